"""Start-up: settings, then parts, then run until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import functools
import gc
import logging
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lllm3090d import log as logging_set_up
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import Settings, default_config_file, default_control_socket, load_settings
from lllm3090d.version import VERSION

if TYPE_CHECKING:
    from lllm3090d.serving.daemon import Daemon

log = logging.getLogger("lllm3090d")

SHUTDOWN_TIMEOUT_S = 3.0
# A build that hangs holds a thread for 20 s for each who waits for its first answer; the rest must be enough for
# everybody else.
LOOKUP_THREADS = 32
MOST_FILES = 65536
SOCKET_UNIT = "lllm3090d.socket"


def command_line() -> argparse.ArgumentParser:
    """What the program takes."""
    parser = argparse.ArgumentParser(
        prog="lllm3090d",
        description="The daemon that owns the graphics card. Usually started by: systemctl --user start lllm3090d",
        epilog="Settings: ~/.config/lllm3090/config.toml and LLLM3090_* variables, see lllm3090-config(5).",
    )
    parser.add_argument("--version", action="version", version=f"lllm3090d {VERSION}")
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="settings file to read")
    parser.add_argument("--check", action="store_true", help="read the settings, say what is wrong, and end")
    parser.add_argument(
        "--json",
        action="store_true",
        help="with --check: as a line of JSON, in the environment of the daemon (lllm3090ctl config)",
    )
    parser.add_argument("--schema", action="store_true", help="write the JSON schema of the file, and end")
    parser.add_argument(
        "--doctor",
        action="store_true",
        help="look at this machine, write a line of JSON, and end (lllm3090ctl doctor)",
    )
    return parser


def main() -> None:
    """Entry of the console script."""
    parser = command_line()
    arguments = parser.parse_args()
    try:
        if arguments.doctor:
            from lllm3090d.doctor import examination  # noqa: PLC0415  # as the parts below

            examination.main(arguments.config)
            return
        if arguments.schema or (arguments.check and arguments.json):
            from lllm3090d.doctor import settings_report  # noqa: PLC0415  # as the parts below

            if arguments.schema:
                sys.stdout.write(settings_report.schema())
            else:
                settings_report.main(arguments.config)
            return
        if arguments.json:
            parser.error("--json goes with --check")
        config_file = arguments.config or default_config_file()
        settings = load_settings(config_file)
        if arguments.check:
            found = "settings are valid" if config_file.exists() else "there is no such file: defaults apply"
            sys.stdout.write(f"{config_file}: {found}\n")
            return
        logging_set_up.set_up(settings.log_level)
        _require_known_state(settings)
        # The watchdog of systemd ends a daemon that hangs by SIGABRT: then the journal has what each thread was doing.
        faulthandler.enable()
        raise_file_limit()
        asyncio.run(run(settings, config_file))
    except LlmError as error:
        hint = f"\n  {error.hint}" if error.hint else ""
        sys.stderr.write(f"lllm3090d: {error.message}{hint}\n")
        sys.exit(int(error.kind.exit_status))


async def run(  # noqa: PLR0915  # start-up is one list, in order
    settings: Settings, config_file: Path
) -> None:
    """Acquire everything, announce, serve, and give it back in reverse order.

    Raises:
        LlmError: a part could not be acquired, or was lost for good.
    """
    # Imported here so that --help, --version and --check cost nothing.
    from aiohttp import web  # noqa: PLC0415

    from lllm3090d.bus.logind import Logind  # noqa: PLC0415
    from lllm3090d.bus.notifications import NotificationService  # noqa: PLC0415
    from lllm3090d.bus.systemd import SystemdManager  # noqa: PLC0415
    from lllm3090d.bus.thread import BusThread  # noqa: PLC0415
    from lllm3090d.engines.process import HELPERS  # noqa: PLC0415
    from lllm3090d.gateway.service import GatewayService  # noqa: PLC0415
    from lllm3090d.gpus.detect import open_cards, unknown_problem  # noqa: PLC0415
    from lllm3090d.gpus.known_cards import recall_cards, remember_cards  # noqa: PLC0415
    from lllm3090d.notify import Notifier, watchdog_limit_s  # noqa: PLC0415
    from lllm3090d.serving.daemon import Daemon  # noqa: PLC0415
    from lllm3090d.serving.sleep_set import kernel_boot_id  # noqa: PLC0415
    from lllm3090d.serving.unit_spec import UNIT_PATTERN  # noqa: PLC0415
    from lllm3090d.surfaces.accepting import Accepting  # noqa: PLC0415
    from lllm3090d.surfaces.control import ControlApi  # noqa: PLC0415
    from lllm3090d.surfaces.dbus_api import DbusApi  # noqa: PLC0415
    from lllm3090d.surfaces.listening import listen  # noqa: PLC0415
    from lllm3090d.surfaces.notifications import Notifications  # noqa: PLC0415
    from lllm3090d.surfaces.self_check import answers  # noqa: PLC0415
    from lllm3090d.watchdog import Part, Watchdog  # noqa: PLC0415
    from lllm3090d.wire import EventKind  # noqa: PLC0415

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS, "lookup"))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    notifier = Notifier()
    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.create_task(notifier.starting())
        stack.callback(starting.cancel)
        bus = BusThread()
        await bus.start()
        stack.push_async_callback(bus.close)
        manager = await SystemdManager.connect(bus, UNIT_PATTERN)
        stack.push_async_callback(manager.close)
        default_socket = default_control_socket()
        activated = await manager.unit_active_state(SOCKET_UNIT) == "active"
        listening = listen(
            settings.control_socket,
            lock_dir=default_socket.parent,
            systemd_listens=activated and settings.control_socket == default_socket,
        )
        stack.callback(listening.close)
        logind = await Logind.connect()
        stack.push_async_callback(logind.close)
        boot_id, known = kernel_boot_id(), recall_cards(settings.state_dir)
        readers = open_cards(settings.card, known=known, boot_id=boot_id)
        for reader in readers:
            stack.callback(reader.close)
        remember_cards(settings.state_dir, [reader.card for reader in readers], boot_id)
        daemon = Daemon(
            settings=settings,
            config_file=config_file,
            readers=readers,
            bus=bus,
            manager=manager,
            logind=logind,
            seats=logind,
        )
        daemon.cards_problem = unknown_problem(readers, known, settings.card)
        loop.set_exception_handler(Accepting(daemon.tell_shortage, time.monotonic))
        await daemon.start()
        api = ControlApi(daemon, manager.version)
        gateway = api.gateway = GatewayService(daemon, api.listings, listening.gateway)
        runner = web.AppRunner(
            api.application(),
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        # After the runner, so that open streams get their last line before connections are closed.
        stack.push_async_callback(daemon.stop)
        await web.SockSite(runner, listening.sock).start()
        await gateway.start()
        stack.push_async_callback(gateway.end)
        # The last of all surfaces, and before READY=1: a call that has started the daemon comes with the name.
        on_bus = DbusApi(api, bus)
        stack.push_async_callback(on_bus.end)
        await on_bus.start()
        notifications = Notifications(api, NotificationService(bus))
        stack.push_async_callback(notifications.end)
        await notifications.start()

        def reload() -> None:
            notifier.reloading()
            error = daemon.reload()
            gateway.settings_changed()
            notifier.ready(
                f"bad settings, the old ones stay: {error.message}" if error else _summary(daemon)
            )

        loop.add_signal_handler(signal.SIGHUP, reload)
        daemon.on_change = lambda: notifier.status(_summary(daemon))
        starting.cancel()
        notifier.ready(_summary(daemon))
        # What is there now stays: a full collection would look at it all, and hold up every stream for 10 ms.
        gc.freeze()
        log.info(
            "ready",
            extra={
                "socket": listening.path,
                "card": ", ".join(reader.card.name for reader in readers),
                "systemd": manager.version,
                "version": VERSION,
            },
        )
        limit_s = watchdog_limit_s()
        if limit_s is not None:
            parts = (
                Part("the writer", daemon.writer_answers),
                Part("the thread of the user's bus", bus.answers, lambda: bus.thread_id),
                Part("the thread of the system bus", logind.answers, lambda: logind.thread_id),
                Part("the control API", functools.partial(answers, listening.path)),
            )
            watchdog = asyncio.create_task(
                Watchdog(
                    parts,
                    notifier,
                    limit_s,
                    tell=lambda text: daemon.history.add(EventKind.DAEMON, message=text),
                ).run(),
                name="watchdog",
            )
            watchdog.add_done_callback(functools.partial(_end_with, daemon.failed))
            stack.callback(watchdog.cancel)
        stopped = asyncio.create_task(stop.wait())
        ends: set[asyncio.Future[Any]] = {stopped, daemon.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        notifier.stopping()
        HELPERS.stop()  # first of all: threads that wait for an engine's answer would hold up everything below
        stopped.cancel()
        log.info("stopping; models %s", "are stopped" if daemon.settings.stop_models_on_exit else "go on")
        if daemon.failed.done():
            _raise_failure(daemon.failed)


def _require_known_state(settings: Settings) -> None:
    """Before anything is touched: what a newer release has written down is not this one's to go by."""
    from lllm3090d.state_schema import require_known_schema  # noqa: PLC0415  # not for --check
    from lllm3090d.store import FILE_NAME  # noqa: PLC0415  # likewise

    require_known_schema(settings.state_dir / FILE_NAME)


def raise_file_limit() -> None:
    """Take what the system allows: every client, follower and engine is a file, and 1024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _end_with(failed: asyncio.Future[None], task: asyncio.Task[None]) -> None:
    """A watchdog that made a mistake feeds nobody: better to end at once and say why."""
    if not task.cancelled() and (error := task.exception()) is not None and not failed.done():
        failed.set_exception(error)


def _summary(daemon: Daemon) -> str:
    names = [f"{instance.name} {instance.state}" for instance in daemon.scheduler.instances]
    return ", ".join(names) or "no models loaded"


def _raise_failure(failed: asyncio.Future[None]) -> None:
    error = failed.exception()
    if isinstance(error, LlmError):
        raise error
    raise LlmError(
        ErrorCode.INTERNAL,
        f"the daemon made a mistake and ends: {type(error).__name__}: {error}",
        hint="Models go on and are adopted at the next start. Please report it.",
    ) from error


if __name__ == "__main__":
    main()
