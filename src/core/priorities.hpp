// Priorities: the TD errors of a ring's rows, and the weights by which rows are drawn.
//
// The priority of a row that can be drawn is (error + eps)^alpha, the weight of its leaf in a sum tree; every other row
// has weight 0. The error is the size of a TD error, kept as float32; all that is computed from it is float64.
#pragma once
#include <cmath>
#include <cstdint>
#include <span>

#include "ring.hpp"
#include "tree.hpp"

namespace relive {

// The answer of a call that takes another way, since something is unusual: it has changed nothing.
inline constexpr std::int64_t UNUSUAL = -1;

// The words of `facts`; files hold them in this order.
struct Facts {
    double alpha;    // the exponent of priorities
    double eps;      // is added to every error
    double largest;  // error that was ever set
    double draws;    // how many batches were drawn; not read here
};
inline constexpr int FACTS = sizeof(Facts) / sizeof(double);

class Priorities {
  public:
    // Throws unless the arrays fit each other. The tree and the ring have to live on.
    Priorities(Tree &tree, KeptVector<float> errors, KeptVector<double> facts, const Ring &ring,
               KeptVector<double> undo);

    // Draw rows by weight among those of a cover, with their probabilities and importance weights (N P)^-beta over the
    // largest one: (P / Pmin)^-beta for every N. `lowest` is the priority that gives Pmin; 0 is the smallest of the
    // batch. False if no leaf has weight; then nothing is written.
    bool draw(std::uint64_t stream, bool stratified, double beta, double lowest, const Cover &among,
              std::span<Place> places, Column<double> probability, Column<float> weight) const;

    // Give rows that can be drawn from now on (1) this error and its weight, and all others (0) no weight, in order.
    void note_drawable(Vector<const Place> places, Vector<const std::uint8_t> drawable, double error, double weight);

    // Set the errors, of either sign, of the rows with these public indices, int64 `[B]`; how many are gone, or can no
    // longer be drawn. Of several errors for one row the last counts.
    //
    // Errors are float32 or float64: `[B]`; or, with a mask, bool, that says which count, `[T, B]` if `time_first`,
    // else `[B, T]`. All are arrays or tensors in RAM, of any strides. If anything is wrong, the answer is UNUSUAL, and
    // nothing changes: other objects, an index that was never issued, an error that float32 cannot hold, a priority
    // that is too large for a sum.
    std::int64_t rate(nb::handle index, nb::handle errors, nb::handle mask, bool time_first, double eta);

    Tree *tree;  // of a leaf for each row
    const Ring *ring;

  private:
    struct Rated {
        Place place;
        float size;
    };
    void require_fit() const;
    bool set(std::span<const Rated> rated);
    void note(std::span<const Rated> rated);
    void expect(Place place) const { tree->expect(place), __builtin_prefetch(&errors_[place]); }

    KeptVector<float> errors_;  // of each row; means nothing where the leaf is 0
    KeptVector<double> words_;  // of the facts
    KeptVector<double> undo_;   // of priorities in files: what `note` notes of so many errors; else empty
    Facts *facts_;
};

}  // namespace relive
