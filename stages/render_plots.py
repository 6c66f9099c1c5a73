"""Command: draws the plots of results/ as one HTML page that needs no network.

DVC's own page loads its drawing scripts from the web and stays blank without it. Here they come
from an installed package and are written into the page's template, .dvc/offline_plots.html.
"""

import subprocess
from pathlib import Path

import click
import vl_convert

from lib.atomic import write_text_atomically
from lib.cli import plain_command
from lib.console import say
from lib.errors import UserError

TEMPLATE = Path(".dvc/offline_plots.html")  # as .dvc/config names it
_VEGA_LITE = "5.21"  # the newest of the major version that DVC writes its plots in
_PAGE = """<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
{refresh_tag}
<title>Drydock plots</title>
<style>body { font-family: sans-serif; margin: 2em; } table { border-spacing: 15px; }</style>
<script>(function () {
SCRIPTS
})();</script>
</head>
<body>
{plot_divs}
</body>
</html>
"""


@plain_command
@click.option("--template-only", is_flag=True, help="Write the page's template and stop.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("dvc_plots"),
    show_default=True,
    help="Folder to write index.html to.",
)
def main(template_only: bool, output: Path) -> None:
    """Draws the plots that dvc.yaml declares, from results/*.csv, also of an unfinished run.

    `dvc plots show` and `dvc plots diff` make the same kind of page once the template exists.
    """
    write_text_atomically(TEMPLATE, offline_page())
    if template_only:
        return
    command = ["dvc", "plots", "show", "--out", str(output)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    page = output / "index.html"
    if done.returncode != 0 or not page.is_file():
        raise UserError("dvc plots show drew nothing: is there a results/*.csv?")
    say(f"open {page.resolve()} in a browser")


def offline_page() -> str:
    """The template of DVC's plot page with all scripts inside.

    They run in a function of their own, since DVC's page uses names of theirs, and must not hold
    the tag that ends a script.
    """
    scripts = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", _VEGA_LITE)
    return _PAGE.replace("SCRIPTS", scripts.replace("</script", "<\\/script"))


if __name__ == "__main__":
    main()
