/* How the site's search ranks what it found: headings that hold the whole query come first, and pages about other
   libraries or about the making of this one come after the guides. The numbers are those of Sphinx. */
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score, , kind]) => {
    const aside = /^(CHANGELOG|CONTRIBUTING|benchmarks|docs\/(contributing|migration|decisions|traps|audit-of-libraries))/;
    return score + (kind === "title" ? 10 : 0) - (aside.test(page) ? 12 : 0);
  },
};
