"""What SkyPilot and GKE are given for runs that nobody watches; their own readers judge it where they are installed."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from data_pipelines.errors import PassingError
from pretrain.training.signals import EXIT_STOPPED
from tpu.generations import CHIPS_PER_HOST, GENERATIONS
from tpu.topologies import parse_accelerator, parse_topology

TPU = Path(__file__).parent.parent.parent / "tpu"
SKY, GKE, PAGE = TPU / "skypilot.yaml", TPU / "gke.yaml", (TPU / "gke.md").read_text()
AGAIN = [EXIT_STOPPED, PassingError.status]


@pytest.fixture(scope="module")
def sky():
    return yaml.safe_load(SKY.read_text())


@pytest.fixture(scope="module")
def gke():
    """The Service and the Job."""
    return list(yaml.safe_load_all(GKE.read_text()))


def test_skypilot_makes_a_slice_that_there_is_with_the_image_of_its_generation(sky):
    resources = sky["resources"]
    found = parse_accelerator(resources["accelerators"].removeprefix("tpu-"))
    assert resources["accelerator_args"]["runtime_version"] == found.runtime and resources["use_spot"]
    assert resources["job_recovery"]["recover_on_exit_codes"] == AGAIN


@pytest.mark.parametrize(
    "ended, seconds, status", [(0, 10, 0), (2, 10, 2), (75, 10, 75), (134, 10, 1), (134, 7200, 134), (1, 7200, 1)]
)
def test_what_ends_soon_with_134_counts_as_an_error_of_which_there_may_be_few(sky, tmp_path, ended, seconds, status):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@"\nexit {ended}\n')
    python.chmod(0o755)
    settings = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "RECIPE": "bert-base", "NAME": "a", "BUCKET": "gs://b"}
    done = subprocess.run(
        ["bash", "-c", f"SECONDS={seconds}\n{sky['run']}"], env=settings, capture_output=True, text=True
    )
    assert done.stdout == "-m pretrain run bert-base --corpus gs://b/corpus --workdir gs://b/a\n"
    assert done.returncode == status and set(settings) - {"HOME", "PATH"} == set(sky["envs"])


def test_gke_has_a_pod_on_each_host_of_its_slice(gke):
    service, job = gke
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    selector = {name.rpartition("gke-")[2]: value for name, value in pod["nodeSelector"].items()}
    (generation,) = [name for name, facts in GENERATIONS.items() if facts.gke == selector["tpu-accelerator"]]
    slice = parse_accelerator(parse_topology(f"{generation}:{selector['tpu-topology']}").cloud)
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"] == slice.hosts and spec["completionMode"] == "Indexed"
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"google.com/tpu": CHIPS_PER_HOST}
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_gke_starts_again_what_is_worth_it_and_nothing_else(gke):
    policy, (container,) = gke[1]["spec"]["podFailurePolicy"], gke[1]["spec"]["template"]["spec"]["containers"]
    taken_away, again, wrong = policy["rules"]
    assert taken_away["action"] == "Ignore" and taken_away["onPodConditions"][0]["type"] == "DisruptionTarget"
    named = {"containerName": container["name"], "values": AGAIN}
    assert again == {"action": "Count", "onExitCodes": {"operator": "In", **named}}
    assert wrong == {"action": "FailJob", "onExitCodes": {"operator": "NotIn", **named}}
    assert f"--restart-on-exit-codes={','.join(map(str, AGAIN))}" in PAGE


def test_the_page_names_every_generation_that_gke_has():
    rows = re.findall(r"^\| (v\w+) \| `([\w-]+)` \| (\S+), (\d+) \|$", PAGE, re.M)
    assert {name: gke for name, gke, _, _ in rows} == {name: one.gke for name, one in GENERATIONS.items() if one.gke}
    for name, _, shape, hosts in rows:
        assert parse_accelerator(parse_topology(f"{name}:{shape}").cloud).hosts == int(hosts)
