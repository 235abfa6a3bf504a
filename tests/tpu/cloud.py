"""A stand-in for gcloud: a script that records how it is called and answers by a list of rules."""

import json
import shlex

# Answers by the first rule whose text occurs in the command line, with the rule's next reply, the last one again and
# again. In sh, because the tests start it some hundred times.
SCRIPT = """#!/bin/sh
for argument; do echo "$argument"; done >> "{folder}/calls"
echo >> "{folder}/calls"
for rule in "{folder}"/rule-*; do
  IFS= read -r text < "$rule/text"
  case "$*" in *"$text"*) break ;; esac
  rule=
done
[ -d "$rule" ] || {{ echo "stand-in for gcloud: no rule for $*" >&2; exit 99; }}
read -r reply < "$rule/next"
[ ! -d "$rule/$((reply + 1))" ] || echo $((reply + 1)) > "$rule/next"
read -r status < "$rule/$reply/status"
if [ "$status" = here ]; then
  for argument; do
    case "$argument" in
      *.tar.gz) cp "$argument" "$HOME" ;;
      --command=*) cd "$HOME" && exec bash -c "${{argument#--command=}}" ;;
    esac
  done
  exit
fi
cat "$rule/$reply/stdout"
cat "$rule/$reply/stderr" >&2
exit "$status"
"""
# Replies: exit status, stdout, stderr
HERE = ["here", "", ""]  # run it on this machine
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
        self.rules = 0
        script = folder / "bin" / "gcloud"
        script.parent.mkdir()
        script.write_text(SCRIPT.format(folder=folder))
        script.chmod(0o755)

    def on(self, text, *replies):
        """Answer commands in which this text occurs."""
        rule = self.folder / f"rule-{self.rules:02}"
        self.rules += 1
        for number, reply in enumerate(replies):
            (rule / str(number)).mkdir(parents=True)
            for name, content in zip(("status", "stdout", "stderr"), reply, strict=True):
                (rule / str(number) / name).write_text(f"{content}\n" if name == "status" else content)
        (rule / "next").write_text("0\n")
        (rule / "text").write_text(f"{text}\n")

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
        calls = (self.folder / "calls").read_text().removesuffix("\n\n").split("\n\n")
        return [shlex.join(["gcloud", *call.split("\n")]) for call in calls]

    def story(self):
        """A word for each command."""
        words = ("storage ls", "queued-resources describe", "queued-resources create", "queued-resources delete")
        words += ("describe", "create", "delete", "scp", "setup", "start", "follow", "report", "kill", "stop", "lines")
        return [next(word for word in words if word in command) for command in self.commands()]
