"""The findings of the doctor on this host and on simulated hosts."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from pagewire import cli, extras
from pagewire.doctor import command
from pagewire.doctor.command import run_doctor
from pagewire.doctor.findings import Findings, nixl_plugins, refusals
from pagewire.doctor.options import DoctorOptions
from pagewire.extras import ENGINES, EXTRAS, installed, missing_packages

HEALTHY = Findings(
    versions={"nixl": "1.5.1"},
    missing={extra: [] for extra in EXTRAS},
    nixl_plugins=["OBJ", "POSIX", "UCX"],
    nixl_error="",
    nixl_settings={"UCX_TLS": "tcp"},
    huge_pages="always [madvise] never",
    ptrace_scope="0",
    gpus=[],
    page_hash_us={"sha256": 0.2, "blake3": 0.7},
    sha256_by="chained.c",
)
GPU = "pages on a GPU (cuda)"


def changed(**changes: object) -> Findings:
    return msgspec.structs.replace(HEALTHY, **changes)


@pytest.mark.parametrize(
    ("found", "what", "why"),
    [
        (changed(nixl_error="no agent"), "a transfer between processes", "no agent"),
        (changed(nixl_plugins=["UCX"]), "an object tier by NixlObjects", "NIXL 1.5.1 has no plugin OBJ"),
        (
            changed(nixl_settings={"UCX_TLS": "sysv,cma"}),
            "a pull from another host",
            "UCX_TLS=sysv,cma cannot reach another host",
        ),
        (changed(ptrace_scope="1"), "a pull by CMA on this host", "ptrace_scope is 1"),
        (changed(page_hash_us={"sha256": 1.0}), 'hash_algorithm="blake3"', "blake3 is not installed"),
        (changed(missing={**HEALTHY.missing, "top": ["textual"]}), "needs the extra 'top'", "not installed: textual"),
    ],
)
def test_each_lack_is_one_refusal_with_its_reason(found: Findings, what: str, why: str) -> None:
    (one,) = [refusal for refusal in refusals(found) if refusal.what != GPU]
    assert what in one.what
    assert why in one.why


def test_a_host_that_has_everything_refuses_only_what_needs_a_gpu() -> None:
    assert [one.what for one in refusals(HEALTHY)] == [GPU]


def test_without_nixl_the_extra_is_named() -> None:
    found = changed(nixl_error="NIXL is not installed", missing={**HEALTHY.missing, "transfer": ["nixl"]})
    assert "pip install 'pagewire[transfer]'" in refusals(found)[0].fix


def test_a_process_that_nixl_aborts_is_reported() -> None:
    dies = (sys.executable, "-c", "import os, sys; print('it burns', file=sys.stderr, flush=True); os.abort()")
    plugins, why = nixl_plugins(dies)
    assert plugins == []
    assert why == "a process that made a NIXL agent ended with status -6: it burns"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_extra_of_an_engine_is_complete_only_with_the_engine(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find", lambda: changed(missing=missing_packages()))

    def listed() -> list[str]:
        run_doctor(DoctorOptions())
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("extras ")]
        return line.removeprefix("extras").strip().split(", ")

    others = [one for one in EXTRAS if one not in ENGINES and all(map(installed, EXTRAS[one]))]
    assert listed() == others  # no engine is installed beside these tests
    assert missing_packages()[engine][-1] == engine
    (tmp_path / engine).mkdir()
    (tmp_path / engine / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert sorted(listed()) == sorted([*others, engine])
    monkeypatch.setattr(extras, "installed", lambda package: package == engine)  # the engine, but not NIXL
    assert missing_packages()[engine] == ["nixl"]
    assert listed() == ["none"]


@pytest.mark.slow
def test_the_command_reports_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", str(tmp_path / "found.json")]) == 0
    told = json.loads((tmp_path / "found.json").read_text())
    printed = capsys.readouterr().out
    assert "UCX" in told["nixl_plugins"]
    assert told["nixl_error"] == ""
    assert {"sha256", "xxh3_128"} <= told["page_hash_us"].keys()
    assert min(told["page_hash_us"].values()) > 0
    for one in told["refusals"]:
        assert f"{one['what']}: {one['why']}. To have it: {one['fix']}" in printed
    assert f"pagewire {told['versions']['pagewire']}" in printed
