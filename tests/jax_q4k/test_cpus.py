"""CPU quotas of containers, in both versions of Linux's control groups."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jax_q4k import control_groups, cpus

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw\n"
    "33 31 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
)
HYBRID = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
CASES = {
    "2, in a container": ("0::/\n", V2, {"cpu.max": "150000 100000\n"}, 1.5),
    "2, a service": (
        "0::/a.slice/b.service\n",
        V2,
        {"a.slice/b.service/cpu.max": "50000 1000"},
        50,
    ),
    "2, a parent's": (
        "0::/a.slice/b\n",
        V2,
        {"a.slice/cpu.max": "200000 100000\n", "a.slice/b/cpu.max": "300000 100000\n"},
        2,
    ),
    "2, none": ("0::/\n", V2, {"cpu.max": "max 100000\n"}, None),
    "2, no controller": ("0::/\n", V2, {}, None),
    "1, named as outside": (
        "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
        V1,
        {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        0.5,
    ),
    "1, a group inside": (
        "4:cpu,cpuacct:/docker/abc/inner\n",
        V1,
        {
            "cpu,cpuacct/inner/cpu.cfs_quota_us": "300000\n",
            "cpu,cpuacct/inner/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        3,
    ),
    "1, none": (
        "1:cpu:/\n",
        HYBRID,
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "1 beside 2": (
        "1:cpu:/x\n0::/\n",
        HYBRID,
        {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
        4,
    ),
    "damaged": ("0::/\nx\n::\n", V2 + "1 2\n - \n", {"cpu.max": "many \x00 5\n"}, None),
    "a period of 0": ("0::/\n", V2, {"cpu.max": "100000 0\n"}, None),
    "a path upwards": ("0::/../..\n", V2, {"cpu.max": "100000 100000\n"}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_quotas(case, tmp_path):
    groups, mounts, files, quota = CASES[case]
    for name, text in (("cgroup", groups), ("mountinfo", mounts)):
        path = tmp_path / "proc" / "self" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpus.quota(tmp_path) == quota


def test_a_quota_is_read_once(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(control_groups, "folders", lambda *where: read.append(where) or [])
    assert [cpus.quota(tmp_path), cpus.quota(tmp_path)] == [None, None]
    assert read == [("cpu", tmp_path)]


def test_a_system_without_control_groups(tmp_path):
    assert cpus.quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "count"), [(None, 8), (0.3, 1), (1.0, 1), (2.5, 3), (7.5, 8), (100.0, 8)]
)
def test_threads_that_a_quota_pays_for(quota, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cpus, "quota", lambda: quota)
    assert cpus.available() == count


@pytest.mark.parametrize(
    ("name", "value", "threads"),
    [("XLA_FLAGS", "", "1"), ("PJRT_NPROC", "3", "3"), ("NPROC", "2", "2")],
)
def test_xlas_threads_of_a_new_process(name, value, threads):
    """The quota counts unless the environment has a number; `import jax_q4k` applies it."""
    code = """
import os, pathlib, sys, jax
from jax_q4k import cpus
os.environ.pop("PJRT_NPROC", None)
os.sched_getaffinity = lambda _: range(4)
cpus.quota = lambda: 0.5
if sys.argv[1]:
    os.environ[sys.argv[1]] = sys.argv[2]
cpus.limit_threads()
jax.numpy.zeros(3).block_until_ready()
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"), cpus.limited_to())
"""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    for variable in cpus.THREADS:
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-c", code, name, value], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == [threads, "0.5" if threads == "1" else "None"], done.stderr
