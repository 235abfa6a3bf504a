"""What the stories of launches share: their commands, and what hosts print and leave."""

from tests.tpu.cloud import Life

NAME = ["--name", "n", "--bucket", "gs://b"]
LAUNCH = ["launch", "bert-tiny", *NAME, "--zone", "z", "--project", "p"]
ONE = [*LAUNCH, "--type", "v5e-8"]
TWO = [*LAUNCH, "--type", "v4-16"]
NOTHING = ({}, {})  # no VM, no request: nothing costs


def steps(*numbers):
    return [f"step {number}" for number in numbers]


def life(*numbers, end=0):
    return Life("\n".join(steps(*numbers)), end)


def gone(cloud):
    return (cloud.vms, cloud.requests) == NOTHING
