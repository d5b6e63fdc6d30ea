"""The wheel holds everything, and works outside the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        ROOT,
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("plait-*.whl"))


def test_the_wheel_holds_the_packages_and_the_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "plait/__init__.py",
        "plait/conf/config.yaml",
        "plait/sweeps/quickstart.yaml",
        "plait_bench/register.py",
        "plait_bench/data/lorafusion_mixed.json",
        "plait_kernels/__init__.py",
        "plait_dashboards/__init__.py",
    ):
        assert name in names
    assert "hydra_plugins/__init__.py" not in names
    assert any(name.startswith("hydra_plugins/plait_sweeper/") for name in names)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["-m", "plait", "--cfg", "job", "adapter.rank=3"], "rank: 3"),
        (["-m", "plait", "bench", "lobra/time_model"], "Held-out mean relative error"),
    ],
    ids=["configuration", "a benchmark with its table"],
)
def test_the_installed_wheel_finds_its_configuration_outside_the_checkout(
    wheel: Path, tmp_path: Path, arguments: list[str], shown: str
) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
