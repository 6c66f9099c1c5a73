"""Makefile, lock file, scratch copies and the plot page."""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from lib.workflow.scratch import source_files
from stages.render_plots import offline_page

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    *("setup", "repro", "check", "smoke", "lint", "types", "test", "test-gpu", "bench", "plots"),
    *("unlock", "clean", "clean-state"),
}


def make(*arguments: str) -> str:
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_lists_every_target() -> None:
    listed = {line.split()[0] for line in make("help").splitlines() if line.startswith("  ")}
    assert listed >= TARGETS
    assert make() == make("help")


def test_repro_applies_the_preset_checks_and_becomes_dvc() -> None:
    commands = make("-n", "repro", "PRESET=laptop")
    order = ["stages.apply_preset laptop", "--schema-only", "stages.check_workflow", "dvc repro"]
    places = [commands.index(text) for text in [*order, "stages.show_summary"]]
    assert places == sorted(places)
    assert re.search(r"^exec python -c .*die_with_parent[^;]*; guard\(\);", commands, re.MULTILINE)


def test_smoke_tries_the_machine_first() -> None:
    commands = make("-n", "smoke")
    places = [commands.index(f"stages.{name}") for name in ("check_hardware", "run_smoke")]
    assert places == sorted(places)


def names(requirements: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in requirements.read_text().splitlines()]
    pairs = [re.match(r"([\w.\-]+)\s*(.*)", line) for line in lines if line]
    return {re.sub(r"[-_.]+", "-", p.group(1)).lower(): p.group(2) for p in pairs if p}


def test_lock_pins_everything_that_is_asked_for() -> None:
    asked, locked = names(ROOT / "requirements.in"), names(ROOT / "requirements.lock")
    assert set(asked) <= set(locked)
    assert all(re.fullmatch(r"==[\w.!]+", version) for version in locked.values())
    assert locked["torch"] == "==2.13.0"
    assert not [name for name in locked if name.startswith(("nvidia", "cuda"))]
    assert "kernels" not in locked


def test_scratch_copy_without_git_takes_sources_only(tmp_path: Path) -> None:
    for name in ("dvc.yaml", "lib/a.py", ".dvc/config", "data/raw/x", "lib/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".dvc" / "cache").mkdir()
    (tmp_path / ".dvc" / "cache" / "big").touch()
    found = {str(path.relative_to(tmp_path)) for path in source_files(tmp_path)}
    assert found == {"dvc.yaml", "lib/a.py", ".dvc/config"}


def test_scratch_copy_with_git_takes_what_git_would(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("/secret\n")
    for name in ("dvc.yaml", "secret", "new.py"):
        (tmp_path / name).touch()
    found = {path.name for path in source_files(tmp_path)}
    assert found == {".gitignore", "dvc.yaml", "new.py"}


class Scripts(HTMLParser):
    """Collects what a page would load, and the length of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loaded += [str(given[name]) for name in ("src", "href") if name in given]
        self.inline += tag == "script" and "src" not in given


def test_plot_page_loads_nothing() -> None:
    page = offline_page()
    scripts = Scripts()
    scripts.feed(page)
    assert (scripts.loaded, scripts.inline) == ([], 1)
    assert page.count("{plot_divs}") == 1
    assert "{scripts}" not in page
    assert "window.vegaEmbed=" in page
    assert page.count("</script") == 1
