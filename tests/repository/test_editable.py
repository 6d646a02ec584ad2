"""An editable install lets type checkers find the package: it adds a path, not an import hook."""

import shutil
import subprocess
import sys
import zipfile

from tests.support.paths import ROOT

BUILD = (
    "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
)


def test_an_editable_install_is_a_path(tmp_path):
    source = tmp_path / "source"
    (source / "recserve").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "recserve/__init__.py"):
        shutil.copy(ROOT / name, source / name)
    shutil.copy(ROOT / "recserve" / "py.typed", source / "recserve")
    shutil.copytree(ROOT / "recserve/kernels", source / "recserve/kernels")
    (source / "tests").mkdir()
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=source, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    name = built.stdout.splitlines()[-1]
    assert name.endswith("-py3-none-any.whl")  # the checkout compiles at the first start
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = wheel.namelist()
        (path,) = [name for name in names if name.endswith(".pth")]
        assert not [name for name in names if name.endswith((".py", ".so"))]
        assert wheel.read(path).decode().strip() == str(source)
