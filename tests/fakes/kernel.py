"""The kernel's file systems as a tree of files: cards in sysfs, processes in proc, control groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lllm3090d.gpus.sysfs import Roots


@dataclass(frozen=True)
class FakeKernel:
    """Made below a directory of a test."""

    root: Path

    def __post_init__(self) -> None:
        for name in ("sys/class/drm", "proc", "cgroup"):
            (self.root / name).mkdir(parents=True)
        self.meminfo(32 << 30, 20 << 30)

    @property
    def roots(self) -> Roots:
        """To be looked at instead of the real ones."""
        return Roots(self.root / "sys", self.root / "proc", self.root / "cgroup", (self.root / "pci.ids",))

    def meminfo(self, total_bytes: int, available_bytes: int) -> None:
        """What proc says of host memory."""
        text = f"MemTotal: {total_bytes // 1024} kB\nMemAvailable: {available_bytes // 1024} kB\n"
        (self.root / "proc" / "meminfo").write_text(text)

    def card(
        self, number: int, vendor: str, driver: str, address: str = "0000:03:00.0", **files: str
    ) -> Path:
        """A card; returns the directory of its PCI device. Further files of that by name."""
        device = self.root / "sys/devices/pci0000:00/0000:00:01.0" / address
        device.mkdir(parents=True)
        (self.root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(self.root / "sys/bus/pci/drivers" / driver)
        for name, text in {"vendor": vendor, "device": "0x744c", **files}.items():
            (device / name).write_text(f"{text}\n")
        entry = self.root / "sys/class/drm" / f"card{number}"
        entry.mkdir()
        (entry / "device").symlink_to(device)
        # Its outputs are listed beside it.
        (self.root / "sys/class/drm" / f"card{number}-DP-1").mkdir()
        return device

    def amd(
        self, number: int = 0, total_bytes: int = 24 << 30, used_bytes: int = 1 << 30, **more: str
    ) -> Path:
        """A card of AMD."""
        files = {"mem_info_vram_total": str(total_bytes), "mem_info_vram_used": str(used_bytes)}
        return self.card(number, "0x1002", "amdgpu", **{**files, **more})

    def regions(self, capacities: dict[str, int], used: dict[str, int]) -> None:
        """What the dmem controller tells in the root group."""
        for name, lines in (("capacity", capacities), ("current", used)):
            text = "".join(f"{region} {size}\n" for region, size in lines.items())
            (self.root / "cgroup" / f"dmem.{name}").write_text(text)

    def process(self, pid: int, control_group: str = "/user.slice", comm: str = "llama-server") -> Path:
        """A process, also in its control group."""
        place = self.root / "proc" / str(pid)
        (place / "fd").mkdir(parents=True)
        (place / "fdinfo").mkdir()
        (place / "cgroup").write_text(f"0::{control_group}\n")
        (place / "comm").write_text(f"{comm}\n")
        group = self.root / "cgroup" / control_group.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        with (group / "cgroup.procs").open("a") as procs:
            procs.write(f"{pid}\n")
        return place

    def memory(self, pid: int, resident_bytes: int, anonymous_bytes: int) -> None:
        """What a process holds in host memory."""
        (self.root / "proc" / str(pid) / "status").write_text(
            f"Name:\tx\nVmRSS:\t{resident_bytes // 1024} kB\nRssAnon:\t{anonymous_bytes // 1024} kB\n"
            "RssShmem:\t0 kB\n"
        )

    def opens(self, pid: int, number: int, text: str, target: str = "/dev/dri/renderD128") -> None:
        """A process opens a device, and its driver tells this of it."""
        place = self.root / "proc" / str(pid)
        (place / "fd" / str(number)).symlink_to(target)
        (place / "fdinfo" / str(number)).write_text(f"pos:\t0\nflags:\t02100002\n{text}")

    def uses(self, pid: int, number: int, client: int, kib: int, address: str = "0000:03:00.0") -> None:
        """A process holds memory of a card of AMD, as amdgpu tells it."""
        self.opens(
            pid,
            number,
            f"drm-driver:\tamdgpu\ndrm-client-id:\t{client}\ndrm-pdev:\t{address}\n"
            f"drm-memory-vram:\t{kib} KiB\ndrm-memory-gtt: \t999 KiB\n",
        )
