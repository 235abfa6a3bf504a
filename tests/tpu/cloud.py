"""A Google Cloud that is not there: slices, requests in line, a bucket, and hosts that run the real tpu/vm.sh.

The launcher's gcloud commands are answered here, in Python; the hosts find the programs of `host`. Time is what the
launcher would have slept. When it fails it says what is in `complaints.toml`.
"""

import contextlib
import json
import re
import shlex
import signal
import subprocess
import threading
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

NODES = "projects/p/locations/z/nodes"
HERE = Path(__file__).parent
COMPLAINTS = SimpleNamespace(**tomllib.loads((HERE / "complaints.toml").read_text()))
INSTALLING = "installing Python and JAX: some minutes\n"  # what a host says before its first start
# The host is gone, some time after it shared its log.
KILLED = 'until grep -rqs "^$last$" {folder}/bucket/b/n/launch/log; do /bin/sleep 0.02; done; kill -9 $PPID; exit 1'
# Older than its script allows.
HANGS = 'touch -d "3 hours ago" "$(readlink /proc/$$/fd/1)"; while :; do /bin/sleep 0.1; done'
TOLD = "until [ $told ]; do /bin/sleep 0.01; done; exit 75"
ASK_TO_STOP = f"echo stop > {{folder}}/bucket/b/n/launch/stop; {TOLD}"


class Life(NamedTuple):
    """One start of the run on a host.

    prints: what.   end: its exit status; 'told': when it is told to, 'stop': and it asks to be; or, with the host,
    'preempted', 'reboots', 'lost'; 'hangs': never.   after: hosts and which of their starts this one waits
    for, as where they join.
    """

    prints: str = ""
    end: int | str = 0
    after: tuple[tuple[str, int], ...] = ()

    def script(self):
        words = ["told=", "trap told=1 TERM", f"last={shlex.quote(self.prints.rpartition(chr(10))[2])}"]
        words += [f"until [ -e {{folder}}/lives/{host}.{n} ]; do /bin/sleep 0.01; done" for host, n in self.after]
        if self.prints:
            words.append(f"printf '%s\\n' {shlex.quote(self.prints)}")
        if isinstance(self.end, int):
            return "\n".join([*words, f"exit {self.end}\n"])
        return "\n".join([*words, {"stop": ASK_TO_STOP, "told": TOLD, "hangs": HANGS}.get(self.end, KILLED), ""])


class Cloud:
    """The cloud, and what is to happen in it. Its bucket keeps versions, so that a listing can show what was removed.

    lives: host -> what its starts come to, one after the other.   wait: seconds in line.   making: seconds to be made.
    faults: [text of a command, what gcloud prints instead of doing it]; each once, in order, for commands that have it.
    lost_answers: the same, and it is done all the same.   at: [time, what happens then].   stuck: creations that hang.
    full: what requests from now on fail with, one after the other.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.now, self.wait, self.making, self.stuck, self.full = 0.0, 60, 60, 0, []
        self.project = "p\n"  # gcloud's own
        self.lives, self.at, self.faults, self.lost_answers, self.commands = {}, [], [], [], []
        self.requests, self.vms, self.created, self.waiting = {}, {}, 0, {}
        for name in ("bin", "lives", "metadata", "bucket/b/corpus"):
            (folder / name).mkdir(parents=True)
        for program in (HERE / "host").iterdir():  # what a host finds for gcloud, the metadata server, Python ...
            (folder / "bin" / program.name).write_text(program.read_text().replace("$CLOUD", str(folder)))
            (folder / "bin" / program.name).chmod(0o755)
        (folder / "unavailable").write_text(COMPLAINTS.UNAVAILABLE)
        (folder / "removed").touch()
        (folder / "bucket/b/corpus/manifest.json").write_text("{}")

    # Time

    def sleep(self, seconds):
        until = self.now + seconds
        assert until < 500_000, "this launch does not end"
        for host in [host for host in self.waiting if not (self.folder / f"bucket/b/n/launch/ended/{host}").exists()]:
            one = self.waiting.pop(host)
            (one[3] / "var/lib/pretrain/vain").unlink()  # as its script does, that was killed
            self.work(*one)
        while self.at and (first := min(self.at, key=lambda one: one[0]))[0] <= until:
            self.at.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = until

    def after(self, seconds, happens):
        self.at.append([self.now + seconds, happens])

    # Slices

    def create(self, name, slices, hosts, kind, metadata):
        self.created += 1
        vms = [name] if slices == 1 else [f"{name}-{number}" for number in range(slices)]
        self.requests[name] = {"state": "WAITING_FOR_RESOURCES"}

        def making():
            if self.full:
                self.requests[name] = {"state": "FAILED", "failedData": {"error": {"message": self.full.pop(0)}}}
            elif name in self.requests:
                self.requests[name] = {"state": "PROVISIONING"}
                self.vms |= {vm: {"state": "CREATING", "acceleratorType": kind, "metadata": metadata} for vm in vms}
                if self.stuck:
                    self.stuck -= 1
                else:
                    self.after(self.making, lambda: ready(self.created))

        def ready(number):
            if number == self.created and set(vms) <= set(self.vms):
                self.requests[name] = {"state": "ACTIVE"}
                for vm in vms:
                    self.vms[vm]["state"] = "READY"
                every = [(vm, worker, metadata) for vm in vms for worker in range(hosts)]
                threads = [threading.Thread(target=self.boot, args=one) for one in every]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        self.after(self.wait, making)

    def take(self, name, state="PREEMPTED"):
        """A spot slice is preempted."""
        self.vms = {vm: one | {"state": state} for vm, one in self.vms.items()}
        if name in self.requests:
            self.requests[name] = {"state": "SUSPENDED"}

    def drop(self):
        self.vms, self.requests = {}, {}
        self.at = [one for one in self.at if one[1].__name__ != "<lambda>"]

    # Hosts

    def boot(self, vm, worker, metadata):
        host = f"{vm}-w-{worker}"
        values = self.folder / "metadata" / host
        values.mkdir(exist_ok=True)
        for name, text in {**metadata, "tpu-env": f"ZONE: 'z'\nNODE_ID: '{vm}'\nWORKER_ID: '{worker}'\n"}.items():
            (values / name).write_text(text)
        disk = self.folder / f"disk-{self.created}-{host}"
        for name in ("run", "root"):
            (disk / name).mkdir(parents=True, exist_ok=True)
        lives = self.folder / "lives" / host
        if not lives.exists():
            lives.mkdir()
            for number, life in enumerate(self.lives.get(host, [Life("step 1\nstep 2", 0)])):
                (lives / str(number)).write_text(life.script().replace("{folder}", str(self.folder)))
        (disk / "startup").write_text(metadata["startup-script"])
        assert self.on(disk, host, disk / "startup") == 0
        self.work(vm, worker, host, disk, metadata)

    def on(self, disk, host, *words):
        environment = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "ROOT": str(disk), "HOSTNAME": host}
        return subprocess.run(["bash", *map(str, words)], env=environment, timeout=300).returncode

    def work(self, vm, worker, host, disk, metadata):
        """As systemd does: again until the status is 0; not for ever, where a script is broken."""
        for _ in range(50):
            if vm not in self.vms or self.vms[vm]["state"] != "READY":
                return
            past = len(self.lives.get(host, [0])) - len(list((self.folder / "lives" / host).iterdir()))
            status = self.on(disk, host, disk / "run/pretrain/vm.sh", "work")
            with contextlib.suppress(FileNotFoundError):  # of two hosts that see it one is first
                (self.folder / "deleted").unlink()
                self.drop()
            if status == -signal.SIGKILL:
                lives = self.lives.get(host, [Life()])
                end = lives[past].end if past < len(lives) else "waits"
                if (self.folder / f"bucket/b/n/launch/ended/{host}").exists():  # for another run
                    self.waiting[host] = (vm, worker, host, disk, metadata)
                elif end == "preempted":
                    self.take(vm.removesuffix("-0"))
                elif end == "reboots":
                    self.boot(vm, worker, metadata)
                return
            if status == 0:
                return

    # gcloud

    def execute(self, command, folder):
        """-> (exit status, stdout, stderr)"""
        self.commands.append(shlex.join(command))
        for faults, done in ((self.lost_answers, True), (self.faults, False)):
            if faults and faults[0][0] in self.commands[-1]:
                complaint = faults.pop(0)[1]
                if done:
                    self.answer(command, Path(folder))
                return 1, "", complaint
        return self.answer(command, Path(folder))

    def answer(self, command, folder):
        words = [word for word in command[1:] if not word.startswith("--")]
        flags = dict(word[2:].partition("=")[::2] for word in command if word.startswith("--"))
        if words[0] == "config":
            return 0, self.project, ""
        if words[0] == "storage":
            return self.storage(words[1:], folder, flags)
        kind, verb, *name = words[2:]
        if verb == "create":
            files = dict(one.split("=") for one in flags["metadata-from-file"].split(","))
            metadata = {key: (folder / file).read_text() for key, file in files.items()}
            slices, kind = int(flags.get("node-count", 1)), flags["accelerator-type"]
            hosts = next(int(line[6:]) for line in metadata["pretrain-settings"].splitlines() if "HOSTS=" in line)
            if name[0] in self.requests or name[0] in self.vms:
                return 1, "", COMPLAINTS.EXISTS
            self.create(name[0], slices, hosts // slices, kind, metadata)
        elif verb == "delete":
            if not (self.vms or self.requests):
                return 1, "", "ERROR: (gcloud) NOT_FOUND: Resource 'projects/p/locations/z/nodes/n' was not found\n"
            self.drop()
        elif kind == "queued-resources":
            place = "projects/p/locations/z/queuedResources"
            return 0, json.dumps([{"name": f"{place}/{one}", "state": s} for one, s in self.requests.items()]), ""
        else:
            found = [{"name": f"{NODES}/{vm}", **state} for vm, state in self.vms.items()]
            return 0, json.dumps([one for one in found if matches(flags["filter"], one["name"])]), ""
        return 0, "", ""

    def storage(self, words, folder, flags):
        path = lambda url: self.folder / "bucket" / url.removeprefix("gs://") if url.startswith("gs:") else folder / url
        verb, *urls = words
        if verb == "cp":
            *files, to = urls
            path(to).parent.mkdir(parents=True, exist_ok=True)
            path(to).mkdir(exist_ok=True) if to.endswith("/") else None
            for file in files:
                target = path(to) / file if to.endswith("/") else path(to)
                if flags.get("if-generation-match", generation(target)) != generation(target):
                    return 1, "", COMPLAINTS.RACED
                target.write_bytes(path(file).read_bytes())
            return 0, "", ""
        if verb == "objects":
            start = path(urls[1].removesuffix("/**"))
            files = sorted(file for file in start.rglob("*") if file.is_file())
            bucket = self.folder / "bucket" / "b"
            time = lambda one: f"{datetime.fromtimestamp(one.stat().st_mtime, UTC):%Y-%m-%dT%H:%M:%S.%f%z}"
            told = lambda one: {"size": one.stat().st_size, "generation": generation(one), "update_time": time(one)}
            named = [{"name": str(one.relative_to(bucket)), **told(one)} for one in files]
            if flags.get("filter") != "-noncurrent_time>1970":
                named += [{"name": name, "size": 1} for name in self.file("removed").splitlines()]
            return 0, json.dumps(named), ""
        if not all(path(url).exists() for url in urls):
            return 1, "", COMPLAINTS.NO_BUCKET
        if verb == "rm":
            for url in urls:
                path(url).unlink()
                with (self.folder / "removed").open("a") as file:
                    file.write(url.removeprefix("gs://b/") + "\n")
            return 0, "", ""
        if verb == "ls":
            return 0, "".join(f"{url}\n" for url in urls), ""
        start = int(flags.get("range", "0-").removesuffix("-"))
        found = b"".join(path(url).read_bytes() for url in urls)[start:]
        return 0, found.decode(errors="surrogateescape"), ""

    # What there is at the end

    def objects(self, below="n/launch"):
        start = self.folder / "bucket" / "b" / below
        return {str(file.relative_to(start)): file.read_text() for file in sorted(start.rglob("*.txt"))}

    def log(self, host):
        """What the run printed, as it is in the bucket."""
        whole = "".join(text for name, text in self.objects().items() if name.startswith(f"log/{host}/"))
        return whole.replace(INSTALLING, "")

    def file(self, name):
        file = self.folder / name
        return file.read_text() if file.exists() else ""


def matches(terms, name):
    """As gcloud does it, in whose filters parentheses are no part of a pattern."""
    assert not set("()") & set(terms)
    return any(re.search(term.removeprefix("name~"), name) for term in terms.split(" OR "))


def generation(file):
    return str(file.stat().st_mtime_ns) if file.exists() else "0"
