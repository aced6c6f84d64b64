"""Many callers, one engine: calls of several threads and of coroutines share its batches.

A thread that waits for a call steps the engine, for all callers, if no other thread does; when its own call is ready it
hands over to another thread that waits. Calls without a thread that waits (`background`) are stepped by a worker thread
that lives as long as there are such calls. So a single call runs in its caller's thread, without any other.

Readers want the engine for themselves (`exclusive`: texts that are read, states that are saved, decoding by hand). They
get it between two steps, and what generates goes on behind them, with its cells but for those that they need. All that
wait get it at one stop, one after the other. Until the next stop samples make some steps (turns.py), the more the
longer they stood. So nobody waits for all that others want, only for a bounded part of it.

One lock guards the queues. It is never held while the engine steps, and never while callers' code (a progress hook)
runs. Only the owner touches the engine; other threads leave commands, which the owner runs between two steps.

A model stays with the process that loaded it: in a child of fork(), which has neither its threads nor its NPU, every
call fails.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tilebeam.engine.engine import Engine
from tilebeam.engine.request import Request, Sample
from tilebeam.engine.scheduler import PREFILL_CHUNK
from tilebeam.engine.turns import STEPS, Turn
from tilebeam.errors import TilebeamError
from tilebeam.native.fork_locks import renew
from tilebeam.native.llama import log_router
from tilebeam.outputs import CompletionOutput, Delta, Progress, RequestOutput


class Call:
    """The requests of one caller.

    Args:
        streams: collect deltas.
        watched: `notify` is wanted after every step, not only in the end.

    Attributes:
        notify: called in the owner's thread, with the lock held: it must not block. None: the caller waits in
            `Dispatcher.wait`.
    """

    def __init__(self, *, streams: bool = False, watched: bool = False) -> None:
        self.requests: list[Request] = []
        self.progress = Progress()
        self.deltas: deque[Delta] = deque()
        self.error: BaseException | None = None
        self.done = False
        self.steps = 0  # that have gone by since the call began
        self.started = time.perf_counter()
        self.streams = streams
        self.watched = watched
        self.notify: Callable[[], None] | None = None
        self.background = False  # no thread waits for it
        self.ready: Callable[[], bool] | None = None  # what the thread in `Dispatcher.wait` waits for
        self.waiter: threading.Condition | None = None
        self._reported: dict[Sample, tuple[int, int]] = {}  # tokens and characters that deltas have reported
        self._told: set[Sample] = set()  # whom `ended` has returned
        self._unfinished: dict[Request, int] = {}  # samples, when `ended` looked last

    def add(self, request: Request) -> None:
        """Make a request part of the call, before it is submitted."""
        self.requests.append(request)
        if self.streams:
            request.on_change = self._on_change

    def snapshot(self) -> Progress:
        """Return the progress by now, for a hook."""
        return replace(self.progress, seconds=time.perf_counter() - self.started)

    def ended(self) -> list[tuple[int, CompletionOutput]]:
        """Return the samples that have ended since the last call, with the numbers of their prompts; not those that
        were aborted."""
        found = []
        for number, request in enumerate(self.requests):
            if self._unfinished.get(request) == request.unfinished:
                continue
            self._unfinished[request] = request.unfinished
            for sample in request.samples:
                if sample.finish not in (None, "aborted") and sample not in self._told:
                    self._told.add(sample)
                    found.append((number, sample.output()))
        return found

    def outputs(self) -> list[RequestOutput]:
        """Return the results of a call that is done.

        Raises:
            TilebeamError: why the call failed.
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
        tokens, chars = self._reported.get(sample, (0, 0))
        text, stable = "", 0
        detokenizer = sample.detokenizer
        if detokenizer is not None:
            text = detokenizer.text
            stable = len(text) if sample.finish else max(chars, detokenizer.stable_length())
        params = sample.request.params
        self.deltas.append(
            Delta(
                index=sample.index,
                text=text[chars:stable],
                token_ids=sample.tokens[tokens:],
                logprobs=sample.logprobs[tokens:] if params.logprobs else None,
                finish_reason=sample.finish,
                stop_reason=detokenizer.stop_string if detokenizer and sample.finish else None,
                top_logprobs=sample.top_logprobs[tokens:] if params.top_logprobs else None,
            )
        )
        self._reported[sample] = len(sample.tokens), stable


_CLOSED = -1  # owner of the engine of a closed model


class _ReaderTurn(Turn):
    """The turn of a thread that wants the engine for itself.

    Attributes:
        due: what generates has stopped for it.
    """

    def __init__(self, wanted: Callable[[], bool], waiter: threading.Condition) -> None:
        super().__init__(wanted)
        self.waiter = waiter
        self.due = False


class Dispatcher:
    """Owns the right to step an engine."""

    def __init__(self, engine: Engine) -> None:
        self.log: list[tuple[int, str]] = []  # llama.cpp's lines of the step under way
        self._engine = engine
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that has the engine
        self._queue: deque[Call] = deque()
        self._readers: deque[_ReaderTurn] = deque()  # that wait; those that are due come first
        self._steps = 0  # to be made before the next stop
        self._active: dict[Call, None] = {}  # in the engine
        self._commands: deque[Callable[[], None]] = deque()  # to be run between two steps
        self._waiters: dict[threading.Condition, None] = {}  # of threads that could step, first come first served
        self._background_calls = 0  # calls
        self._worker: threading.Thread | None = None
        self._users = 0  # threads that read the model, which needs no turn
        self._closed = False
        self._forked = False
        _dispatchers.add(self)

    # --- calls ------------------------------------------------------------------------------------------------------

    def submit(self, call: Call, *, background: object = None) -> None:
        """Put a call into the queue.

        Args:
            background: the worker thread steps the call, as no thread waits for it, and keeps this object alive
                meanwhile (it must not be collected while the engine works).

        Raises:
            TilebeamError: closed, or the engine failed before.
        """
        with self._lock:
            self._check_usable()
            if not call.requests:
                call.done = True
                return
            self._queue.append(call)
            if background is not None:
                call.background = True
                self._background_calls += 1
                if self._worker is None:
                    self._worker = threading.Thread(target=self._run_worker, args=(background,), name="tilebeam")
                    self._worker.start()

    def wait(self, *calls: Call, ready: Callable[[], bool] = lambda: False) -> None:
        """Return when one of the calls is done, or `ready`, stepping the engine meanwhile if no other thread does.

        Raises:
            TilebeamError: this thread has the engine for itself, so that the calls could never start.
        """
        with self._lock:
            waiter = threading.Condition(self._lock)
            for call in calls:
                call.waiter, call.ready = waiter, ready
            try:
                self._wait_until(lambda: any(call.done for call in calls) or ready(), waiter)
            finally:
                for call in calls:
                    call.waiter = call.ready = None

    def cancel(self, call: Call) -> None:
        """End what is not finished of a call; it is done soon. Never blocks for long."""
        with self._lock:
            if call.done:
                return
            if call in self._queue:
                self._drop(call)
            else:
                self._command(lambda: self._drop(call))

    def cancel_prompt(self, call: Call, number: int) -> None:
        """End what is not finished of one of a call's prompts; the others go on."""
        with self._lock:
            if not call.done:
                self._command(lambda: self._drop_prompt(call, call.requests[number]))

    def abandon(self, call: Call) -> None:
        """Do what `cancel` does, for a destructor, which may run in any thread, even in one that holds the lock."""
        if call.done:
            return
        self._commands.append(lambda: self._drop(call))
        if self._lock.acquire(blocking=False):
            try:
                if self._owner is None:
                    self._run_commands()
            finally:
                self._lock.release()

    def set_caching(self, on: bool) -> None:
        """Call `PrefixCache.set_caching` before the next step."""
        with self._lock:
            self._command(lambda: self._engine.kv.set_caching(on))

    # --- exclusive use ----------------------------------------------------------------------------------------------

    @contextmanager
    def exclusive(self) -> Iterator[Turn]:
        """Hold the engine, between two steps, for this thread only. Reentrant; an inner turn is never over.

        Raises:
            TilebeamError: closed, or the engine failed before.
        """
        me = threading.get_ident()
        if self._owner == me:
            yield Turn(lambda: False)
            return
        with self._lock:
            self._check_usable()
            turn = _ReaderTurn(self._is_wanted, threading.Condition(self._lock))
            self._readers.append(turn)
            try:
                self._wait_until(lambda: self._owner is None and self._is_next(turn), turn.waiter)
                self._check_usable()
                self._owner = me
            finally:
                self._readers.remove(turn)
                if self._owner != me:
                    self._wake_next()
            self._run_commands()
        try:
            with log_router().capture() as self.log:
                self._engine.lend()
                yield turn
        finally:
            with self._lock:
                self._owner = _CLOSED if self._forked else None
                self._steps += turn.tokens // PREFILL_CHUNK if turn.due else 0
                self._run_commands()
                self._wake_next()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the model while this thread reads what never changes (its vocabulary): `close` waits.

        Raises:
            TilebeamError: closed, or the engine failed before.
        """
        with self._lock:
            self._check_usable()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._closed:
                    self._wake_next()

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def close(self) -> bool:
        """Fail every call, and wait until no thread uses the engine. True for one thread, which shall free it.

        Raises:
            TilebeamError: this thread itself is using the engine.
        """
        me = threading.get_ident()
        with self._lock:
            if self._owner == me and not self._closed:
                raise TilebeamError("A thread that is using the model's context cannot close the model.")
            if not self._closed:
                self._closed = True
                error = TilebeamError("The model was closed while this call was waiting.")
                for call in [*self._active, *self._queue]:
                    call.fail(error)
                    self._forget(call)
                self._queue.clear()
                for waiter in self._waiters:
                    waiter.notify()
            waiter = threading.Condition(self._lock)
            self._waiters[waiter] = None
            while self._users or self._owner not in (None, _CLOSED):
                waiter.wait()
            del self._waiters[waiter]
            first, self._owner = self._owner is None, _CLOSED
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()
        return first

    def _leave_to_parent(self) -> None:
        """Close the model in a forked child, where nothing of it is freed."""
        renew(self._lock)
        self._closed = self._forked = True
        self._owner, self._users, self._worker = _CLOSED, 0, None
        for collection in (self._active, self._queue, self._readers, self._commands, self._waiters):
            collection.clear()

    def _check_usable(self) -> None:
        if self._closed:
            raise self._closed_error("This model is closed; load it again.")
        if self._engine.broken:
            raise self._engine.broken

    def _closed_error(self, otherwise: str) -> TilebeamError:
        forked = "This model belongs to the process that forked this one; load it again here."
        return TilebeamError(forked if self._forked else otherwise)

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _wait_until(self, ready: Callable[[], bool], waiter: threading.Condition) -> None:
        me = threading.get_ident()
        try:
            while not ready():
                if self._closed:
                    raise self._closed_error("The model was closed while this call was waiting.")
                if self._owner == me:
                    raise TilebeamError(
                        "This thread is using the model's context (in raw_decode, or a hook of read): nothing can be "
                        "generated before it is done."
                    )
                if self._owner is None and self._has_work():
                    self._drive(me, ready)
                else:
                    # This thread may have stepped to where one that wants the engine for itself is next.
                    self._wake_next()
                    self._waiters[waiter] = None
                    try:
                        waiter.wait()
                    finally:
                        self._waiters.pop(waiter, None)
        finally:
            self._wake_next()

    def _has_work(self) -> bool:
        """Return whether there is anything for an owner to do: not while readers take their turns."""
        stopped = bool(self._readers) and self._readers[0].due
        return not stopped and bool(self._commands or self._queue or self._engine.busy)

    def _is_wanted(self) -> bool:
        """Return whether anybody wants the engine, without taking the lock."""
        return bool(self._readers or self._queue or self._closed) or self._engine.busy

    def _is_next(self, reader: _ReaderTurn) -> bool:
        """Return whether it is this reader's turn, once no thread has the engine."""
        return self._readers[0] is reader and (reader.due or not self._has_work())

    def _wake_next(self) -> None:
        """Wake the thread that goes on, if no thread has the engine."""
        if self._closed:
            for waiter in self._waiters:
                waiter.notify()
        elif self._owner is None:
            if self._readers and self._is_next(self._readers[0]):
                self._readers[0].waiter.notify()
            elif self._has_work() and self._waiters:
                next(iter(self._waiters)).notify()

    def _drive(self, me: int, ready: Callable[[], bool]) -> None:
        """Step until `ready`, closed, nothing is left to do, or it is time for readers."""
        self._owner = me
        try:
            with log_router().capture() as self.log:
                while not self._closed:
                    self._run_commands()
                    self._begin_calls()
                    if ready() or not self._engine.busy or self._stops():
                        break
                    self._step()
        finally:
            self._owner = _CLOSED if self._forked else None

    def _stops(self) -> bool:
        """Return whether it is time for all readers that wait now, which are due then."""
        if not self._readers or self._steps > 0:
            return False
        for reader in self._readers:
            reader.due = True
        self._steps = STEPS
        return True

    def _begin_calls(self) -> None:
        while self._queue:
            call = self._queue.popleft()
            self._active[call] = None
            for request in call.requests:
                self._engine.submit(request)

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
        self._steps -= self._steps > 0 and not self._engine.scheduler.recovers
        for call in list(self._active):
            call.steps += 1
            if any(r.error is not None for r in call.requests):
                self._drop(call)
            elif all(r.unfinished == 0 for r in call.requests):
                self._complete(call)
            elif call.watched:
                call.progress.running = self._engine.running(call.progress)
                self._wake(call)

    def _fail_all(self, error: BaseException) -> None:
        """End every call in the engine after a failed step, and those in the queue if it failed for good."""
        if not isinstance(error, Exception):
            error = TilebeamError("The thread that was decoding for all callers was interrupted; call again.")
        calls = list(self._active)
        if self._engine.broken:
            calls += self._queue
            self._queue.clear()
        for call in calls:
            for request in call.requests:
                request.on_change = None
        self._engine.abort()
        for call in calls:
            call.fail(error)
            self._forget(call)

    def _command(self, what: Callable[[], None]) -> None:
        """Have something done to the engine between two steps: now, if no thread has it."""
        self._commands.append(what)
        if self._owner is None:
            self._run_commands()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _drop(self, call: Call) -> None:
        if call.done:
            return
        if call in self._queue:
            self._queue.remove(call)
        for request in call.requests:
            self._engine.cancel(request)
        self._complete(call)

    def _drop_prompt(self, call: Call, request: Request) -> None:
        if not call.done:
            self._engine.cancel(request)
            if all(r.unfinished == 0 for r in call.requests):
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
        """Forget a call that is done."""
        self._active.pop(call, None)
        if call.background:
            call.background = False
            self._background_calls -= 1
            if self._background_calls == 0:
                for waiter in self._waiters:  # the worker is one of them, or steps
                    waiter.notify()
        self._wake(call)

    def _wake(self, call: Call) -> None:
        if call.notify is not None:
            if call.done or call.deltas or not call.streams:
                call.notify()
        elif call.waiter is not None and (call.done or (call.ready is not None and call.ready())):
            call.waiter.notify()

    def _run_worker(self, background: object) -> None:
        """Step as long as there are calls that no thread waits for."""
        with self._lock:
            self._wait_until(lambda: self._background_calls == 0 or self._closed, threading.Condition(self._lock))
            self._worker = None
        # Only now may what was kept alive go: its destructor needs the lock.
        del background


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for dispatcher in list(_dispatchers):
        dispatcher._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
