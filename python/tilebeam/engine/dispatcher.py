"""Many callers, one engine: calls of several threads and of coroutines share its batches.

Whoever waits for a call leads, if nobody else does: it steps the engine, for everybody, until what it waits for has
come, and then hands over to another that waits. Calls that nobody waits for in a thread of their own (`background`) are
led by a thread that lives as long as there are any. So a call alone runs in its own thread, without any other.

Calls and those who need the engine for themselves (`alone`: reading logits, decoding by hand) stand in one line. What
stands behind an `alone` starts after it, and it starts when everything before it has ended: nobody waits for ever.

One lock guards the line. It is never held while the engine steps, and never while anybody's code (a progress hook)
runs. The engine is touched by the owner only; everybody else leaves a note, which the owner reads between two steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tilebeam.engine.engine import Engine
from tilebeam.engine.request import Request, Sample
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import log_router
from tilebeam.outputs import Delta, Progress, RequestOutput


class Call:
    """The requests of one caller.

    Args:
        streams: collect deltas.
        watched: `news` is wanted after every step, not only in the end.
        news: called in the owner's thread, with the lock held: it must not block. None: the caller waits in
            `Dispatcher.wait`.
    """

    def __init__(self, *, streams: bool = False, watched: bool = False, news: Callable[[], None] | None = None) -> None:
        self.requests: list[Request] = []
        self.progress = Progress()
        self.deltas: deque[Delta] = deque()
        self.error: BaseException | None = None
        self.done = False
        self.steps = 0  # that have gone by since the call began
        self.started = time.perf_counter()
        self.streams = streams
        self.watched = watched
        self.news = news
        self.background = False  # nobody waits for it in a thread
        self.ready: Callable[[], bool] | None = None  # what the thread in `Dispatcher.wait` waits for
        self.waiter: threading.Condition | None = None
        self._told: dict[Sample, tuple[int, int]] = {}  # tokens and characters that deltas told

    def add(self, request: Request) -> None:
        """Make a request part of the call, before it is submitted."""
        self.requests.append(request)
        if self.streams:
            request.on_change = self._on_change

    def snapshot(self) -> Progress:
        """The progress by now, for a hook."""
        return replace(self.progress, seconds=time.perf_counter() - self.started)

    def outputs(self) -> list[RequestOutput]:
        """The results of a call that is done.

        Raises:
            TilebeamError: why there are none.
        """
        if self.error is not None:
            raise self.error
        return [r.output() for r in self.requests]

    def fail(self, error: BaseException) -> None:
        """End the call with an exception of its own: one object raised in two threads would mix their tracebacks."""
        try:
            own = type(error)(*error.args)
        except Exception:  # an exception with a constructor of its own kind
            own = TilebeamError(str(error))
        own.__cause__ = error.__cause__
        self.error = own
        self.done = True

    def _on_change(self, sample: Sample) -> None:
        tokens, chars = self._told.get(sample, (0, 0))
        text, settled = "", 0
        if sample.stream is not None:
            text = sample.stream.text
            settled = len(text) if sample.finish else max(chars, sample.stream.settled())
        params = sample.request.params
        self.deltas.append(
            Delta(
                index=sample.index,
                text=text[chars:settled],
                token_ids=sample.tokens[tokens:],
                logprobs=sample.logprobs[tokens:] if params.logprobs else None,
                finish_reason=sample.finish,
                stop_reason=sample.stream.stop_string if sample.stream and sample.finish else None,
                top_logprobs=sample.top_logprobs[tokens:] if params.top_logprobs else None,
            )
        )
        self._told[sample] = len(sample.tokens), settled


_NOBODY = -1  # owns the engine of a closed model


class _Alone:
    """A place in the line of somebody who wants the engine for themselves."""

    def __init__(self, waiter: threading.Condition) -> None:
        self.waiter = waiter


class Dispatcher:
    """Owns the right to step an engine."""

    def __init__(self, engine: Engine) -> None:
        self.log: list[tuple[int, str]] = []  # llama.cpp's lines of the step under way
        self._engine = engine
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that has the engine
        self._line: deque[Call | _Alone] = deque()
        self._active: dict[Call, None] = {}  # in the engine
        self._notes: deque[Callable[[], None]] = deque()  # to be done between two steps
        self._waiters: dict[threading.Condition, None] = {}  # could lead, first come first
        self._background = 0  # calls
        self._pump: threading.Thread | None = None
        self._users = 0  # threads that read the model, which needs no turn
        self._closed = False

    # --- calls ------------------------------------------------------------------------------------------------------

    def submit(self, call: Call, *, background: object = None) -> None:
        """Put a call into the line.

        Args:
            background: somebody shall step the call although no thread waits for it, and keep this object alive
                meanwhile (what must not be collected while the engine works).

        Raises:
            TilebeamError: closed, or the engine failed before.
        """
        with self._lock:
            self._usable()
            if not call.requests:
                call.done = True
                return
            self._line.append(call)
            if background is not None:
                call.background = True
                self._background += 1
                if self._pump is None:
                    self._pump = threading.Thread(target=self._run_pump, args=(background,), name="tilebeam")
                    self._pump.start()

    def wait(self, call: Call, ready: Callable[[], bool]) -> None:
        """Return when the call is done or `ready`, stepping the engine meanwhile if nobody else does.

        Raises:
            TilebeamError: this thread has the engine for itself, so that the call could never start.
        """
        with self._lock:
            call.waiter = threading.Condition(self._lock)
            call.ready = ready
            try:
                self._until(lambda: call.done or ready(), call.waiter)
            finally:
                call.waiter = call.ready = None

    def cancel(self, call: Call) -> None:
        """End what is not finished of a call; it is done soon. Never blocks for long."""
        with self._lock:
            if call.done:
                return
            if call in self._line:
                self._drop(call)
            else:
                self._note(lambda: self._drop(call))

    def abandon(self, call: Call) -> None:
        """`cancel` for a destructor, which may run anywhere, even in a thread that holds the lock."""
        if call.done:
            return
        self._notes.append(lambda: self._drop(call))
        if self._lock.acquire(blocking=False):
            try:
                if self._owner is None:
                    self._read_notes()
            finally:
                self._lock.release()

    def keep(self, on: bool) -> None:
        """`Engine.keep`, before the next step."""
        with self._lock:
            self._note(lambda: self._engine.keep(on))

    # --- the engine for oneself -------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The engine, idle, for this thread only. Reentrant.

        Raises:
            TilebeamError: closed, or the engine failed before.
        """
        me = threading.get_ident()
        if self._owner == me:
            yield
            return
        with self._lock:
            self._usable()
            place = _Alone(threading.Condition(self._lock))
            self._line.append(place)
            try:
                self._until(
                    lambda: self._owner is None and self._line[0] is place and not self._engine.busy, place.waiter
                )
                self._usable()
                self._owner = me
            finally:
                self._line.remove(place)
                if self._owner != me:
                    self._pass_on()
            self._read_notes()
        try:
            with log_router().capture() as self.log:
                yield
        finally:
            with self._lock:
                self._owner = None
                self._read_notes()
                self._pass_on()

    @contextmanager
    def using(self) -> Iterator[None]:
        """The model stays while this thread reads what never changes (its vocabulary): `close` waits.

        Raises:
            TilebeamError: closed, or the engine failed before.
        """
        with self._lock:
            self._usable()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._closed:
                    self._pass_on()

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> bool:
        """Fail everybody who waits, and wait until nobody uses the engine. True for one thread, which shall free it.

        Raises:
            TilebeamError: this thread itself is using the engine.
        """
        me = threading.get_ident()
        with self._lock:
            if self._owner == me and not self._closed:
                raise TilebeamError("The model cannot be closed by who is using its context.")
            if not self._closed:
                self._closed = True
                error = TilebeamError("The model was closed while this call was waiting.")
                for call in [*self._active, *(c for c in self._line if isinstance(c, Call))]:
                    call.fail(error)
                    self._forget(call)
                self._line = deque(a for a in self._line if isinstance(a, _Alone))
                for waiter in self._waiters:
                    waiter.notify()
            waiter = threading.Condition(self._lock)
            self._waiters[waiter] = None
            while self._users or self._owner not in (None, _NOBODY):
                waiter.wait()
            del self._waiters[waiter]
            first, self._owner = self._owner is None, _NOBODY
            pump = self._pump
        if pump is not None and pump is not threading.current_thread():
            pump.join()
        return first

    def _usable(self) -> None:
        if self._closed:
            raise TilebeamError("This model is closed; load it again.")
        if self._engine.broken:
            raise self._engine.broken

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _until(self, ready: Callable[[], bool], waiter: threading.Condition) -> None:
        me = threading.get_ident()
        try:
            while not ready():
                if self._closed:
                    raise TilebeamError("The model was closed while this call was waiting.")
                if self._owner == me:
                    raise TilebeamError(
                        "This thread is using the model's context (in raw_decode, or a hook of read): nothing can be "
                        "generated before it is done."
                    )
                if self._owner is None and self._has_work():
                    self._lead(me, ready)
                else:
                    self._waiters[waiter] = None
                    try:
                        waiter.wait()
                    finally:
                        self._waiters.pop(waiter, None)
        finally:
            self._pass_on()

    def _has_work(self) -> bool:
        """Whether there is anything that an owner could do for those who wait."""
        return bool(self._notes) or self._engine.busy or bool(self._line and isinstance(self._line[0], Call))

    def _pass_on(self) -> None:
        """Wake who goes on, if nobody has the engine."""
        if self._closed:
            for waiter in self._waiters:
                waiter.notify()
        elif self._owner is None:
            head = self._line[0] if self._line else None
            if not self._has_work() and isinstance(head, _Alone):
                head.waiter.notify()
            elif self._has_work() and self._waiters:
                next(iter(self._waiters)).notify()

    def _lead(self, me: int, ready: Callable[[], bool]) -> None:
        """Step until `ready`, closed, or nothing is left to do."""
        self._owner = me
        try:
            with log_router().capture() as self.log:
                while not self._closed:
                    self._read_notes()
                    while self._line and isinstance(call := self._line[0], Call):
                        self._line.popleft()
                        self._active[call] = None
                        for request in call.requests:
                            self._engine.submit(request)
                    if ready() or not self._engine.busy:
                        break
                    self._step()
        finally:
            self._owner = None

    def _step(self) -> None:
        self.log.clear()
        try:
            try:
                self._lock.release()
                self._engine.step()
            finally:
                self._lock.acquire()
        except BaseException as error:
            self._fail_all(error)
            if not isinstance(error, Exception):
                raise
            return
        for call in list(self._active):
            call.steps += 1
            failed = any(r.error is not None for r in call.requests)
            if failed:
                self._drop(call)
            elif all(r.unfinished == 0 for r in call.requests):
                self._complete(call)
            elif call.watched:
                call.progress.running = self._engine.running(call.progress)
                self._wake(call)

    def _fail_all(self, error: BaseException) -> None:
        """A step went wrong: end every call in the engine, and those in the line if it is for good."""
        if not isinstance(error, Exception):
            error = TilebeamError("The thread that was decoding for all callers was interrupted; call again.")
        calls = list(self._active)
        if self._engine.broken:
            calls += [c for c in self._line if isinstance(c, Call)]
            self._line = deque(a for a in self._line if isinstance(a, _Alone))
        for call in calls:
            for request in call.requests:
                request.on_change = None
        self._engine.abort()
        for call in calls:
            call.fail(error)
            self._forget(call)

    def _note(self, what: Callable[[], None]) -> None:
        """Have something done to the engine between two steps: now, if nobody has it."""
        self._notes.append(what)
        if self._owner is None:
            self._read_notes()

    def _read_notes(self) -> None:
        while self._notes:
            self._notes.popleft()()

    def _drop(self, call: Call) -> None:
        if call.done:
            return
        if call in self._line:
            self._line.remove(call)
        for request in call.requests:
            self._engine.cancel(request)
        self._complete(call)

    def _complete(self, call: Call) -> None:
        for request in call.requests:
            if request.error is not None:
                call.fail(request.error)
                break
        call.done = True
        call.progress.running = 0
        self._forget(call)

    def _forget(self, call: Call) -> None:
        """A call is done."""
        self._active.pop(call, None)
        if call.background:
            call.background = False
            self._background -= 1
            if self._background == 0:
                for waiter in self._waiters:  # the pump is one of them, or leads
                    waiter.notify()
        self._wake(call)

    def _wake(self, call: Call) -> None:
        if call.news is not None:
            if call.done or call.deltas or not call.streams:
                call.news()
        elif call.waiter is not None and (call.done or (call.ready is not None and call.ready())):
            call.waiter.notify()

    def _run_pump(self, background: object) -> None:
        """Lead as long as there are calls that no thread waits for."""
        with self._lock:
            self._until(lambda: self._background == 0 or self._closed, threading.Condition(self._lock))
            self._pump = None
        # Only now may what was kept alive go: its destructor needs the lock.
        del background
