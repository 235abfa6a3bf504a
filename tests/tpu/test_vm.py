"""The script on the hosts, run here; in the place of Python and Google's programs it finds small ones."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.tpu.cloud import Cloud, Life
from tpu import launch

SETTINGS = "STATE=gs://b/n/launch\nHOSTS=1\nFIRST=n-w-0\nRUN=(a --corpus 'b c' --workdir gs://b/n '*')\nDELETE=()\n"
DELETING = SETTINGS.replace("DELETE=()", "DELETE=(gcloud compute tpus queued-resources delete n --quiet)")


SCRIPT = (launch.ROOT / "tpu" / "vm.sh").read_text()


@pytest.fixture
def host(cloud):
    """Starts a host of a slice that is there; `later`: as far as the run's first start, which a test gives."""
    launched = cloud.folder / "bucket/b/n/launch"
    launched.mkdir(parents=True)
    (launched / "settings.sh").write_text(SETTINGS)
    launch.pack(launch.ROOT, launched / "code.tar.gz")
    cloud.vms["n"] = {"state": "READY"}

    def start(settings=SETTINGS, later=False):
        if later:
            cloud.lives["n-w-0"] = [Life("step 1")]
            cloud.work = lambda *_: None
        cloud.boot("n", 0, {"startup-script": SCRIPT, "pretrain-settings": settings})

    return start


def work(cloud, life):
    """The run's first start on the host is this script."""
    (cloud.folder / "lives/n-w-0/0").write_text(life)
    Cloud.work(cloud, "n", 0, "n-w-0", cloud.folder / "disk-0-n-w-0", {})


def ended(cloud):
    """The host's report."""
    return cloud.file("bucket/b/n/launch/ended/n-w-0")


def program(cloud, name, text):
    """A program that the host finds."""
    (cloud.folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
    (cloud.folder / "bin" / name).chmod(0o755)


GAVE_UP = "134 error: n-w-0 gave up after 6"


def test_systemd_starts_it_again_until_it_says_that_it_has_ended(cloud, host):
    host()
    *options, shell, script, what = cloud.file("unit").splitlines()
    assert "--unit=pretrain" in options and "--no-block" in options
    properties = [one.removeprefix("--property=") for one in options if one.startswith("--property=")]
    assert {"Restart=on-failure", "RestartSec=10", "OOMPolicy=continue", "StartLimitIntervalSec=0"} <= set(properties)
    assert "KillMode=mixed" in properties  # SIGTERM goes to the script, which passes it on
    assert [shell, script, what] == ["/bin/bash", f"{cloud.folder}/disk-0-n-w-0/run/pretrain/vm.sh", "work"]


def test_packages_come_by_make_and_its_lock_file_and_arguments_arrive_as_they_were_given(cloud, host):
    host()
    here = cloud.folder / "disk-0-n-w-0/var/lib/pretrain"
    assert cloud.file("made") == f"--silent setup ACCELERATOR=tpu PYTHON=/new/python VENV={here}/venv\n"
    assert cloud.file("argument-list") == "<-m><pretrain><run><a><--corpus><b c><--workdir><gs://b/n><*>"
    assert (here / "code" / "Makefile").exists()


def test_its_python_is_one_that_uv_brings_which_is_fetched_where_there_is_none(cloud, host):
    (cloud.folder / "bin/uv").rename(cloud.folder / "metadata/uv")
    (cloud.folder / "metadata/n-w-0").mkdir()
    (cloud.folder / "metadata/n-w-0/install.sh").write_text(
        f"mkdir -p $HOME/.local/bin; cp {cloud.folder}/metadata/uv $HOME/.local/bin/\n"
    )
    host()
    assert cloud.file("uv") == "python install --quiet 3.12\npython find 3.12\n"
    assert "PYTHON=/new/python " in cloud.file("made")


def test_switching_off_lets_the_run_write_its_checkpoint_and_shares_its_last_lines(cloud, host):
    """SIGTERM, as systemd sends it when a slice is preempted; it is no end of the run."""
    end = "until [ $told ]; do /bin/sleep 0.01; done; echo checkpoint; exit 75"
    host(later=True)
    life = cloud.folder / "lives/n-w-0/0"
    life.write_text(life.read_text().replace("exit 0", end))
    disk = cloud.folder / "disk-0-n-w-0"
    environment = {"PATH": f"{cloud.folder / 'bin'}:/usr/bin:/bin", "ROOT": str(disk), "HOSTNAME": "n-w-0"}
    words = ["bash", disk / "run/pretrain/vm.sh", "work"]
    script = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        while "step 1" not in cloud.log("n-w-0"):
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    assert cloud.log("n-w-0") == "step 1\ncheckpoint\n"
    assert not (cloud.folder / "bucket/b/n/launch/ended").exists()


def test_a_log_that_ends_within_a_line_is_whole_all_the_same(cloud, host):
    host(later=True)
    work(cloud, "printf 'step 1\\n1%%\\rno end'; exit 2\n")
    assert cloud.log("n-w-0") == "step 1\n1%\nno end\n"  # \r, as Python reads it
    assert ended(cloud) == "2 1% no end\n"  # a report is one line


def test_starts_without_a_new_checkpoint_are_counted_and_given_up(cloud, host):
    cloud.lives["n-w-0"] = [Life(f"step {number}", 134) for number in range(9)]
    host()
    assert cloud.log("n-w-0") == "".join(f"step {number}\n" for number in range(6))
    assert ended(cloud).startswith(GAVE_UP)
    assert [one for one in cloud.file("slept").split() if one not in ("20", "60")] == ["40", "80", "160", "320", "640"]


def test_a_run_that_moves_on_between_its_aborts_starts_as_often_as_it_takes(cloud, host):
    ends = [*range(8), *(f"8.orbax-checkpoint-tmp-{number}" for number in range(9))]
    host(later=True)
    cloud.lives["n-w-0"] *= len(ends)
    for number, name in enumerate(ends):
        life = f"echo start {number}; mkdir -p {cloud.folder}/bucket/b/n/checkpoints/{name}; exit 134\n"
        (cloud.folder / f"lives/n-w-0/{number}").write_text(life)
    work(cloud, (cloud.folder / "lives/n-w-0/0").read_text())
    assert cloud.log("n-w-0") == "".join(f"start {number}\n" for number in range(14))  # 8, and 6 that saved nothing
    assert ended(cloud).startswith(GAVE_UP)


def test_a_bucket_that_does_not_always_answer_does_not_hide_that_nothing_is_saved(cloud, host):
    (cloud.folder / "bucket/b/n/checkpoints/8").mkdir(parents=True)
    answering, asked = cloud.folder / "bin/answering", cloud.folder / "asked"
    (cloud.folder / "bin/gcloud").rename(answering)
    refused = f"echo >> {asked}; [ $(($(wc -l < {asked}) % 2)) -eq 1 ] || {{ echo HTTPError 503 >&2; exit 1; }}"
    program(cloud, "gcloud", f'case "$*" in *checkpoints/) {refused};; esac\nexec {answering} "$@"')
    cloud.lives["n-w-0"] = [Life(f"step {number}", 134) for number in range(9)]
    host()
    assert cloud.log("n-w-0") == "".join(f"step {number}\n" for number in range(6))


def test_a_work_directory_may_end_with_a_slash(cloud, host):
    settings = SETTINGS.replace("gs://b/n ", "gs://b/n/ ")
    (cloud.folder / "bucket/b/n/launch/settings.sh").write_text(settings)
    host(settings)
    assert "storage ls gs://b/n/checkpoints/\n" in cloud.file("host-calls")
    assert "//checkpoints" not in cloud.file("host-calls")


def test_settings_that_the_metadata_server_does_not_give_at_once_are_waited_for(cloud, host):
    answer = f'for last; do :; done\ncat "{cloud.folder}/metadata/$HOSTNAME/${{last##*/}}"'
    program(cloud, "curl", f"[ -e {cloud.folder}/slept ] || exit 22\n{answer}")
    host()
    assert cloud.file("slept").startswith("10\n")
    assert ended(cloud) == "0 step 2\n"


def test_a_run_that_hangs_is_killed_and_started_again_and_that_not_for_ever(cloud, host):
    cloud.lives["n-w-0"] = [Life(f"step {number}", "hangs") for number in range(9)]
    host()
    log = cloud.log("n-w-0")
    assert log.count("error: n-w-0 printed nothing for 7200 seconds and was killed\n") == 6 and "step 5\n" in log
    assert ended(cloud).startswith(GAVE_UP)


def test_a_host_that_is_not_the_first_prints_nothing_for_hours(cloud, host):
    (cloud.folder / "bucket/b/n/launch/settings.sh").write_text(SETTINGS.replace("FIRST=n-w-0", "FIRST=n-w-1"))
    host(later=True)
    work(cloud, 'touch -d "3 hours ago" "$(readlink /proc/$$/fd/1)"; /bin/sleep 1; exit 3\n')
    assert ended(cloud).startswith("3 ")


def test_a_gcloud_that_hangs_is_ended(cloud, host):
    program(cloud, "timeout", f'echo "$*" >> {cloud.folder}/limited\nshift 3\nexec "$@"')
    host()
    limited = cloud.file("limited").splitlines()
    assert [line.removeprefix("-k 10 600 gcloud ") for line in limited] == cloud.file("host-calls").splitlines()


def test_a_host_whose_disk_fails_says_so_and_deletes_its_slice(cloud, host):
    read_only = "mv root no-root; mv var/lib/pretrain gone; touch root var/lib/pretrain"
    (cloud.folder / "bucket/b/n/launch/settings.sh").write_text(DELETING)
    host(later=True)
    work(cloud, f"cd {cloud.folder}/disk-0-n-w-0; {read_only}; exit 134\n")
    assert ended(cloud) == "134 error: n-w-0 cannot write to its disk\n" and not cloud.vms


def test_a_host_whose_name_another_zones_slice_has_taken_writes_nothing_and_leaves(cloud, host):
    (cloud.folder / "bucket/b/n/launch/settings.sh").write_text("# in another zone\n" + DELETING.replace("n ", "n-2 "))
    host(DELETING)
    assert not cloud.vms and cloud.log("n-w-0") == ""
    files = sorted(file.name for file in (cloud.folder / "bucket/b/n/launch").iterdir())
    assert files == ["code.tar.gz", "settings.sh"]
    deletions = [call for call in cloud.file("host-calls").splitlines() if " delete " in call]
    assert deletions == ["compute tpus queued-resources delete n --quiet"]


def test_a_host_without_gcloud_installs_one_until_that_succeeds(cloud, host):
    cloud.work = lambda *_: None
    host()
    programs, gcloud, installed = cloud.folder / "programs", cloud.folder / "bin/gcloud", cloud.folder / "installed"
    programs.mkdir()
    for one in Path("/usr/bin").iterdir():
        if one.name != "gcloud":
            (programs / one.name).symlink_to(one)
    gcloud.rename(programs / "later")
    program(cloud, "snap", f"echo $* >> {installed}\n[ $(wc -l < {installed}) -lt 3 ] || cp {programs}/later {gcloud}")
    disk = cloud.folder / "disk-0-n-w-0"
    environment = {"PATH": f"{cloud.folder / 'bin'}:{programs}", "ROOT": str(disk), "HOSTNAME": "n-w-0"}
    subprocess.run(["/bin/bash", disk / "run/pretrain/vm.sh", "work"], env=environment, timeout=60)
    assert installed.read_text() == "install google-cloud-cli --classic\n" * 3
    assert ended(cloud) == "0 step 2\n"
