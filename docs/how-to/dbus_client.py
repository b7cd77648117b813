"""Load a model over D-Bus and wait until it is ready: python3 dbus_client.py MODEL"""

import sys

import pydbus
from gi.repository import GLib

loop = GLib.MainLoop()
manager = pydbus.SessionBus().get("org.lllm3090.Manager1", "/org/lllm3090/Manager1")
ends: dict[str, str] = {}
manager.JobCompleted.connect(
    lambda job, kind, model, told: (ends.update({job: told["endpoint"]}), loop.quit())
)
manager.JobFailed.connect(
    lambda job, kind, model, error, why: (ends.update({job: f"{error}: {why}"}), loop.quit())
)
job = manager.Load(sys.argv[1], {})
while job not in ends:
    loop.run()
print(ends[job])
