"""Processes that run the tests of a file that needs one of its own, such as one with several devices."""

import json
import os
import subprocess
import sys

import pytest

REPORTS = "PYTEST_REPORTS"  # in a started process: the file descriptor that it writes its reports to


class Reporting:
    """In the started process."""

    def __init__(self, config, pipe):
        self.config, self.pipe = config, pipe

    def pytest_runtest_logreport(self, report):
        found = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        print(json.dumps(found), file=self.pipe, flush=True)


class Started:
    """The process that runs some tests, and its reports as they come."""

    def __init__(self, items, devices=1, **environment):
        self.config, (read, write) = items[0].config, os.pipe()
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "XLA_FLAGS": flags, REPORTS: str(write), **environment}
        options = ["-q", "--tb=no", "-m", "", "-o", f"cache_dir={self.config.getini('cache_dir')}"]
        command = [sys.executable, "-m", "pytest", *options, *(item.nodeid for item in items)]
        place = {"cwd": self.config.rootpath, "env": environment, "pass_fds": [write]}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, **streams, **place)
        os.close(write)
        self.pipe = os.fdopen(read)
        self.config.add_cleanup(self.process.kill)

    def reports(self, item):
        """Of one test, in whose order the process runs them; a failure where it has ended."""
        for line in self.pipe:
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(line))
            yield report
            if (report.nodeid, report.when) == (item.nodeid, "teardown"):
                return
        said = self.process.communicate()[0][-3000:]
        call = pytest.CallInfo.from_call(lambda: pytest.fail(f"its process has ended:\n{said}"), "call")
        yield item.ihook.pytest_runtest_makereport(item=item, call=call)
