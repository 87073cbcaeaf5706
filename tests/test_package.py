"""What a release says of itself agrees; its front page works without a checkout."""

import importlib.metadata
import pathlib
import re
import subprocess
import tomllib

from click.testing import CliRunner

from stowax._cli._cli import main

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_everywhere():
    version = PROJECT["version"]
    newest = re.search(
        r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert newest
    assert cited
    assert (newest[1], cited[1]) == (version, version)
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", newest[2])


def test_version_says_what_an_issue_needs():
    result = CliRunner().invoke(main, ["--version"])
    assert result.output.startswith(f"stowax {importlib.metadata.version('stowax')} (")
    assert f"jax {importlib.metadata.version('jax')}, " in result.output
    assert "python 3." in result.output


def test_links_of_the_front_page_lead_somewhere():
    """A package's page has no folder that a relative link could start from."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text()
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures
    assert all("raw.githubusercontent" in picture for picture in pictures)
    # And what they name is there.
    for link in links:
        name = re.sub(r"^.*?/v\$HFPR_VERSION/", "", link).partition("#")[0]
        assert (ROOT / name).exists(), link


def test_a_release_whose_versions_differ_is_refused(tmp_path):
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools" / "release"
    script.write_text((ROOT / "tools" / "release").read_text())

    def refused(*arguments):
        run = subprocess.run(
            ["bash", script, *arguments], capture_output=True, text=True, timeout=60
        )
        assert run.returncode in (1, 2)
        return run.stderr

    version = PROJECT["version"]
    said = refused("--tag", "v9.9.9")
    assert said == f"tools/release: the tag is v9.9.9, and the version is {version}\n"
    log = tmp_path / "CHANGELOG.md"
    log.write_text(f"# Changes\n\n## {version} (unreleased)\n")
    assert "CHANGELOG.md has no date" in refused("--tag", f"v{version}")
    log.write_text("# Changes\n\n## 0.0.1 (2026-01-01)\n")
    assert "the newest section of CHANGELOG.md is '0.0.1" in refused()
    assert "unknown argument '--publish'" in refused("--publish")
    assert not (tmp_path / "dist").exists()
