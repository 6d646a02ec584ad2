"""What `recserve doctor` finds, and what it says to do."""

import pytest

from recserve.cli import doctor
from recserve.doctor import kernel_comparison
from recserve.kernels.native import native, processor
from tests.support.tiny_llm import tiny_llm


def test_this_machine_passes():
    """The machine that runs the tests has all that recserve needs."""
    findings = doctor.examine()
    assert [f.name for f in findings] == [
        "python",
        "packages",
        "device",
        "faiss",
        "kernels",
        "open files",
        "disk",
        "clock",
    ]
    assert not [f for f in findings if f.state == "fail"]


def test_who_computes_is_shown(monkeypatch, force_kernels):
    force_kernels("auto")
    monkeypatch.setattr(native, "library", lambda: object())
    monkeypatch.setattr(processor, "instruction_set", lambda: "x86-64-v4-bf16")
    assert doctor.check_kernels().detail == "C, compiled for x86-64-v4-bf16"
    monkeypatch.setattr(native, "library", lambda: None)
    assert doctor.check_kernels().detail.startswith("torch: no compiled C kernels")
    force_kernels("torch")
    assert doctor.check_kernels().detail == "torch: RECSERVE_KERNELS is torch"


def test_c_and_torch_are_compared_on_demand(monkeypatch):
    monkeypatch.setattr(kernel_comparison, "BUDGET_S", 0.0)
    assert not [f for f in doctor.examine() if f.name == "measured kernels"]
    (finding,) = (f for f in doctor.examine(measure=True) if f.name == "measured kernels")
    lines = finding.detail.splitlines()
    if native.library() is None:
        assert lines == ["nothing to compare: no compiled C kernels and no C compiler"]
    else:
        assert len(lines) == 6 and all(": C " in line and " ms, torch " in line for line in lines)


def test_kernels_of_served_models_are_listed_for_the_weights_that_serve(tmp_path, force_kernels):
    force_kernels("torch")
    folder = tiny_llm(tmp_path / "llm")
    for weights, shown in ((None, False), ("int8", True)):
        (finding,) = (f for f in doctor.examine(llm=folder, weights=weights) if "served" in f.name)
        products = [line for line in finding.detail.splitlines() if ": products of " in line]
        assert len(products) == 1 and all(("int8" in line) == shown for line in products)


def test_a_missing_package_is_named():
    finding = doctor.check_packages(("torch", "no-such-package-here"))
    assert finding.state == "fail"
    assert "no-such-package-here" in finding.detail
    assert "torch" not in finding.detail


def test_an_old_python_fails(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 9))
    finding = doctor.check_python()
    assert finding.state == "fail"
    assert "3.11 or newer" in finding.detail


def test_a_full_disk_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 1 << 62)
    assert doctor.check_disk(tmp_path).state == "warn"


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    """The other checks still run."""

    def broken():
        raise OSError("clock is gone")

    monkeypatch.setattr(doctor, "check_clock", broken)
    findings = {f.name: f for f in doctor.examine()}
    assert findings["clock"].state == "fail"
    assert findings["clock"].detail == "OSError: clock is gone"
    assert findings["python"].state == "ok"


def test_a_bundle_that_is_not_there_fails(tmp_path):
    findings = {f.name: f for f in doctor.examine(bundle=tmp_path / "none")}
    assert findings["bundle"].state == "fail" and findings["searches"].state == "fail"


def test_stores_are_asked(tmp_path):
    """LMDB in a folder answers; nothing listens on port 1 of loopback."""
    assert doctor.check_store(f"lmdb:{tmp_path / 'history'}").state in {"ok", "warn"}
    findings = {f.name: f for f in doctor.examine(store="redis://127.0.0.1:1/0")}
    assert findings["store"].state == "fail"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("lmdb:/data/history", "lmdb:/data/history"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@db:6379/0", "redis://:***@db:6379/0"),
        ("redis://me:secret@db:6379/0", "redis://me:***@db:6379/0"),
    ],
)
def test_passwords_are_not_printed(url, shown):
    assert doctor.without_password(url) == shown
