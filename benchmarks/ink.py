"""The colours of the charts, which follow the reader's choice of light or dark, and the beginning of an SVG."""

LIGHT = {"text": "#222222", "paper": "#ffffff", "ours": "#1f4e79", "peer": "#9dbfe0", "hand": "#d8b365"}
DARK = {"text": "#e6edf3", "paper": "#131416", "ours": "#6cb0f5", "peer": "#3d5a78", "hand": "#a8852f"}
GREY = "#8f8f8f"  # on either paper


def ink(name: str) -> str:
    """The value of an attribute such as fill: that colour, light or dark."""
    return f"var(--{name})"


def head(width: float, height: float, size: int) -> list[str]:
    """The first lines of a picture, in pixels, with text of that size."""
    light, dark = (" ".join(f"--{name}: {color};" for name, color in inks.items()) for inks in (LIGHT, DARK))
    style = f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = f'font-family="sans-serif" font-size="{size}" fill="{ink("text")}"'
    paper = f'<rect width="{width}" height="{height}" fill="{ink("paper")}"/>'
    return [f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>', f"<style>\n{style}\n</style>", paper]
