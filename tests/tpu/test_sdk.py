"""The commands as Google's own SDK reads them, where it is installed: with servers here in the place of Google's."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data_pipelines.errors import UserError
from tests.gcs import Storage
from tpu.gcloud import Gcloud, GcloudError, Slice
from tpu.watch import CUT, news, read_reports

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("gcloud") is None, reason="no Google Cloud SDK here")]
NODES = ["nodes/n", "nodes/n-1", "nodes/run-n", "nodes/n-x"]
READY = {
    "state": "READY",
    "acceleratorType": "v4-8",
    "metadata": {"pretrain-settings": "# {}\nSTATE=gs://b/n/launch\n"},
}
REQUESTS = ["queuedResources/n", "queuedResources/n-1", "queuedResources/nn"]


class Answers(BaseHTTPRequestHandler):
    """Cloud TPU's lists."""

    status = 200

    def do_GET(self):
        failed = {"state": "FAILED", "failedData": {"error": {"code": 8, "message": "no capacity"}}}
        place = "projects/p/locations/z"
        answer = {
            "nodes": [{"name": f"{place}/{name}", **READY} for name in NODES],
            "queuedResources": [{"name": f"{place}/{name}", "state": failed} for name in REQUESTS],
        }
        refusal = {"error": {"code": self.status, "status": "NOT_FOUND", "message": "none"}}
        text = json.dumps(answer if self.status == 200 else refusal)
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def sdk(tmp_path, monkeypatch):
    """A Gcloud whose commands ask a server on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "token")
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", f"http://127.0.0.1:{server.server_port}/")
    yield Gcloud(Slice("n", "gs://b", "z", "p", "v4-8"), str(tmp_path))
    server.shutdown()


def test_a_look_sees_that_a_vm_is_of_another_buckets_run(sdk):
    sdk.where = sdk.where._replace(bucket="gs://c")
    with pytest.raises(UserError, match="--name n: belongs to another bucket's run in z of p: use another --name"):
        sdk.look()


def test_a_look_finds_the_request_and_its_vms_and_none_of_another_name(sdk):
    assert sdk.look() == {"the request": ("FAILED", "no capacity"), "n": ("READY", "v4-8")}


def test_an_answer_that_is_an_error_has_its_kind(sdk, monkeypatch):
    monkeypatch.setattr(Answers, "status", 404)
    with pytest.raises(GcloudError, match="NOT_FOUND") as caught:
        sdk.look()
    assert caught.value.kind == "other"


def test_objects_are_written_listed_read_and_removed(sdk, monkeypatch, tmp_path):
    bucket = Storage("b")
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", f"{bucket.url}/storage/v1/")
    assert sdk.objects() == {}
    bucket.put("b", "n/launch/log/n-w-0/1.txt", b"step 1\n")
    [(name, one)] = sdk.objects().items()
    assert (name, one["size"], one["update_time"][:4]) == ("log/n-w-0/1.txt", 7, "2026")
    shown = {}
    assert news(sdk, sdk.objects(), shown) == ["step 1\n"]
    bucket.put("b", "n/launch/log/n-w-0/1.txt", b"step 1\nstep 2\nste")
    assert news(sdk, sdk.objects(), shown) == ["step 2\n"]
    for host, line in (("a", "0 done\n"), ("b", "2 no\n")):
        (tmp_path / "ended").write_text(line)
        sdk.storage("cp", "ended", f"gs://b/n/launch/ended/{host}")
    assert read_reports(sdk, sdk.objects()) == {"a": (0, "done"), "b": (2, "no")}
    seen = [0, sdk.objects()["ended/a"]["generation"]]
    for name, generation in zip("za", seen, strict=True):  # none was there, and the one that was seen
        sdk.storage("cp", "ended", f"gs://b/n/launch/ended/{name}", f"--if-generation-match={generation}")
        with pytest.raises(GcloudError, match="someone else is launching it now"):
            sdk.storage("cp", "ended", f"gs://b/n/launch/ended/{name}", f"--if-generation-match={generation}")
    sdk.storage("rm", "gs://b/n/launch/ended/z")
    bucket.put("b", "n/launch/ended/c", b"")
    assert read_reports(sdk, sdk.objects())["c"] == CUT
    sdk.storage("rm", "gs://b/n/launch/ended/a", "gs://b/n/launch/ended/b")
    assert list(sdk.objects()) == ["ended/c", "log/n-w-0/1.txt"]
    bucket.close()
