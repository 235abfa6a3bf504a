"""A stand-in for gcloud: a script that records how it is called and answers by a list of rules."""

import json
import shlex
import stat
import sys

# Rules: [text that occurs in the command line, [reply, ...]]; the first rule that fits answers, with its next reply
# (the last one again and again). A reply is [exit status, stdout, stderr]; "here" runs it on this machine.
SCRIPT = """#!{python} -IS
import json, os, shutil, subprocess, sys
folder, arguments = {folder!r}, sys.argv[1:]
with open(folder + "/calls", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
line = " ".join(arguments)
for number, (text, replies) in enumerate(json.load(open(folder + "/rules"))):
    if text in line:
        break
else:
    sys.exit("stand-in for gcloud: no rule for " + line)
with open(folder + "/used-" + str(number), "a+") as file:
    used = file.tell()
    file.write(".")
reply = replies[min(used, len(replies) - 1)]
if reply == "here":
    home = os.environ["HOME"]
    if "scp" in arguments:
        shutil.copy(arguments[arguments.index("scp") + 1], home)
        sys.exit()
    command = [a for a in arguments if a.startswith("--command=")][0].partition("=")[2]
    sys.exit(subprocess.run(["bash", "-c", command], cwd=home).returncode)
sys.stdout.write(reply[1])
sys.stderr.write(reply[2])
sys.exit(reply[0])
"""
OK = [0, "", ""]
NOT_FOUND = [1, "", "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource 'nodes/n' was not found.\n"]
REFUSED = [
    255,
    "",
    "SSH: Attempting to connect to worker 0...\nssh: connect to host 1.2.3.4 port 22: Connection refused\n"
    "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].\n",
]


def failing(text):
    return [1, "", f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {text}\n"]


def vm(state, kind="v5litepod-16"):
    return [0, json.dumps({"state": state, "acceleratorType": kind, "health": "HEALTHY"}), ""]


def queue(state, **more):
    return [0, json.dumps({"state": {"state": state, **more}}), ""]


def report(*states):
    return [0, "".join(f"t1v-n-w-{number}: {state}\n" for number, state in enumerate(states)), ""]


class Cloud:
    """Rules for the stand-in, and what it was called with."""

    def __init__(self, folder):
        self.folder = folder
        self.rules = []
        script = folder / "bin" / "gcloud"
        script.parent.mkdir()
        script.write_text(SCRIPT.format(python=sys.executable, folder=str(folder)))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def on(self, text, *replies):
        """Answer commands in which this text occurs."""
        self.rules.append([text, list(replies)])
        (self.folder / "rules").write_text(json.dumps(self.rules))

    def otherwise_healthy(self, status=0):
        """Answer the rest as for a run that ends with this status on a slice that is new."""
        self.on("queued-resources describe", NOT_FOUND)
        self.on("tpu-vm describe", NOT_FOUND, vm("READY"))
        self.on("follow", [0, "step 1\nstep 2\n", ""])
        self.on("report", report(f"ended {status}"))
        for text in ("storage ls", "create", "delete", "scp", "setup", "start", "kill"):
            self.on(text, OK)

    def commands(self):
        """The command lines, in order."""
        calls = self.folder / "calls"
        return [shlex.join(["gcloud", *json.loads(line)]) for line in calls.read_text().splitlines() if line]

    def story(self):
        """A word for each command."""
        words = ("storage ls", "queued-resources describe", "queued-resources create", "queued-resources delete")
        words += ("describe", "create", "delete", "scp", "setup", "start", "follow", "report", "kill", "stop", "lines")
        return [next(word for word in words if word in command) for command in self.commands()]
