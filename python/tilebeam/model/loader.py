"""Load a GGUF file, ordinary or repacked, onto the NPU or the CPU; refuse with a sentence whatever cannot work.

llama.cpp aborts on some bad input and computes garbage on other, so the options (load_options.py) and the file
(file_check.py) are checked before it sees them, and a repacked file is believed only once the plugin has counted as
many tiled tensors as the file lists.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tilebeam.errors import NpuError, PlacementWarning, TilebeamError
from tilebeam.model import device_choice, hub, memory_check
from tilebeam.model import packed_cache as packed_files
from tilebeam.model.cache_size import KV_BYTES
from tilebeam.model.device_choice import Choice
from tilebeam.model.file_check import CheckedFile, inspect
from tilebeam.model.head_file import HeadFile, attach, check_fits, head_file
from tilebeam.model.load_options import MAX_DEVICES, CheckedOptions, Device, KvType, LoadOptions
from tilebeam.model.lora import Lora, files_and_scales
from tilebeam.model.placement import Placement, Planner, Use
from tilebeam.model.refusals import check_deterministic, refuse
from tilebeam.native import releases
from tilebeam.native.control import Control, LoadResult, control
from tilebeam.native.fork_locks import free_in_children
from tilebeam.native.interrupts import Interrupts
from tilebeam.native.npu_options import Executor
from tilebeam.native.plugin import ggml
from tilebeam.native.register import own_load

if TYPE_CHECKING:
    from tilebeam.model.core import LoadInfo
    from tilebeam.model.lm import LM
    from tilebeam.native.layer_tap import LayerTap
    from tilebeam.native.llama import Model

# Texts that may be kept for others to go on from, for each that decodes. A search by steps goes on from beams of all
# prompts; those that were forgotten meanwhile are decoded again.
KEPT = 7
# One load at a time: executor and memory limit are options of the whole program.
_loading = free_in_children()
# Room for logits of one batch; bounds how many positions `LM.logits` gets out of one llama_decode.
_LOGITS_BYTES = 256 << 20
# Share of a load that packing into the cache is.
_PACKING = 0.9
# And loading the model, where a draft model is loaded, too.
_MODEL = 0.9
# ggml's types of the KV cache.
_KV_TYPES: dict[KvType, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}


def load(
    model: str | os.PathLike[str],
    device: Device = LoadOptions.device,
    n_ctx: int = LoadOptions.n_ctx,
    n_seq_max: int = LoadOptions.n_seq_max,
    threads: int | None = LoadOptions.threads,
    *,
    n_batch: int = LoadOptions.n_batch,
    n_ubatch: int | None = LoadOptions.n_ubatch,
    executor: Executor | None = LoadOptions.executor,
    flash_attn: bool = LoadOptions.flash_attn,
    type_k: KvType = LoadOptions.type_k,
    type_v: KvType = LoadOptions.type_v,
    n_gpu_layers: int = LoadOptions.n_gpu_layers,
    devices: int | None = LoadOptions.devices,
    memory_limit: int | str | Sequence[int | str] | None = LoadOptions.memory_limit,
    lora: Lora | Sequence[Lora] = (),
    cache_ram: int | str = LoadOptions.cache_ram,
    packed_cache: int | str | None = LoadOptions.packed_cache,
    swa_full: bool | None = LoadOptions.swa_full,
    hidden_layer: int | None = LoadOptions.hidden_layer,
    draft: str | os.PathLike[str] | None = None,
    lookup: bool | None = LoadOptions.lookup,
    deterministic: bool = LoadOptions.deterministic,
    verify: bool = LoadOptions.verify,
    verbose: bool = LoadOptions.verbose,
    progress: Callable[[float], object] | None = None,
) -> LM:
    """Load a model.

    Of an embedding or rerank model (BERT, Nomic, Jina ..), only `LM.embed` or `LM.rerank` can be asked; n_ctx then is
    the longest text, at most what the model was trained for, and n_batch and n_ubatch mean nothing.

    Args:
        model: a GGUF file, ordinary or written by ``gguf-repack``; of a split model any part. Or a model of Hugging
            Face's hub, "hf://owner/repo:Q4_K_M" (hub.py), which is downloaded if need be.
        device: "tilebeam" (or "npu"); "cpu" for llama.cpp's stock CPU backend (ordinary files only); or "auto":
            tilebeam, unless a rule says that the CPU backend alone is faster. An option that only Tilebeam has asks for
            it too.
        n_ctx: KV cells, shared by all sequences; rounded up to a multiple of 256.
        n_seq_max: samples that decode at the same time, at most 256.
        threads: NPU worker threads, or CPU threads on the CPU; None: TILEBEAM_THREADS, or one per performance core that
            this process may use, within its CPU quota.
        n_batch: most tokens per llama_decode; at least n_seq_max.
        n_ubatch: most tokens per graph; None: n_batch.
        executor: "thread", "process", or "qemu-hexagon" (Hexagon code in Debian's emulator: slow, to try that code);
            None: that of a session that runs, or "thread", or TILEBEAM_NPU.
        flash_attn: use flash attention; without it attention runs as several slower ops.
        type_k, type_v: "f16", "f32", "q8_0" or "q4_0" for the KV cache.
        n_gpu_layers: layers on the NPU; -1 for all. A repacked file needs all.
        devices: how many NPU sessions (HMX0, HMX1 ..) to spread the model over, by layers, at most 15. None: one,
            with a memory limit as few as the model fits on.
        memory_limit: bytes of address space that each session may map, as a number or as "2GiB"; 0 for none; a list
            has one for each device, and its last entry counts for all further ones. None: that of a session that runs,
            or none.
        lora: LoRA adapters in force in everything that the model computes: GGUF files, or pairs (file, scale); scale 1
            changes the model as the adapter was trained to.
        cache_ram: MiB, or a size such as "2GiB", of memory for states of texts at earlier tokens, so that prompts can
            go on from them: of models with recurrent layers, whose state cannot go back. 0: none. `tilebeam doctor -m`
            tells how much one has.
        packed_cache: bytes, or a size such as "20GiB", for packed files that are kept in ~/.cache/tilebeam, so that the
            next load of an ordinary file maps it, and processes share it; those used longest ago go (docs/repack.md).
            0: none. None: TILEBEAM_PACKED_CACHE, or none.
        swa_full: layers with a sliding window (Gemma, gpt-oss) get as many KV cells as others, so that prompts can go
            on from any token that was read before; False: cells for their windows, which takes less memory with a large
            n_ctx. None: full, unless the whole cache then takes more than half of the memory that this process can
            have. `tilebeam doctor -m` tells which.
        hidden_layer: the samples' hidden states (``SamplingParams(hidden=True)``, for `OwnReward`) are those behind
            this layer, from 0, not those behind the final norm: what its reward head was trained for (``Head.layer``).
            Prompts share batches with the samples then. None: the final norm.
        draft: what guesses tokens ahead (speculative decoding), a GGUF file: a small model with the same vocabulary, or
            a draft head that ``tilebeam draft train`` made for this model. With a head texts are looked up, too.
        lookup: guess tokens ahead from the prompt, the other samples and earlier texts; False: never. None: where at
            most four samples decode together and no draft model is given. Texts are drawn as without guesses, from
            logits that a larger batch changes a little (docs/seeds.md); docs/speculation.md says when which pays.
        deterministic: a prompt's tokens and log-probabilities are the same bits whatever runs beside it, however many
            samples there are, in whatever pieces the prompt is read, and on any number of threads (docs/seeds.md).
            Nothing is guessed. TILEBEAM_DETERMINISTIC=1 asks for it too.
        verify: read a repacked file through and compare its digests, as ``gguf-repack verify`` does. The structure of
            any file is always checked.
        verbose: show llama.cpp's log.
        progress: called with the share that is done, from 0 to 1. What it raises ends the load, and is raised here.

    Raises:
        TilebeamError: with a sentence that says why not; nothing stays loaded.

    Warns:
        CacheWarning: no packed file is kept, or it is made anew or not used, and why.
        PlacementWarning: matrices run on the CPU that were not asked to: their share, why, and what to do.
    """
    arguments = locals()
    given = {one.name: arguments[one.name] for one in fields(LoadOptions)}
    options = LoadOptions(**given).checked()
    if options.deterministic and draft is not None:
        raise TilebeamError("deterministic and a draft model exclude each other: guesses change the batch.")
    if draft is not None and hub.is_name(draft):
        draft = hub.local_file(os.fspath(draft))
    head = None if draft is None else head_file(draft)
    if lookup and draft is not None and head is None:
        raise TilebeamError("lookup and a draft model exclude each other: choose one source of guesses.")
    if head is not None and lookup is False:
        raise TilebeamError("lookup=False and a draft head exclude each other: with a head, texts are looked up, too.")
    if hub.is_name(model):
        model = hub.local_file(os.fspath(model))
    file = inspect(model, options.verify, files_and_scales(lora))
    if not file.generates:
        if draft is not None or lookup:
            raise TilebeamError(f"{file.path} is an embedding model, which gives no next token: nothing to guess.")
        n_ctx = min(options.n_ctx, (file.n_ctx_train + 255) // 256 * 256 or options.n_ctx)
        options, lookup = replace(options, n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ctx), False  # one graph for a text
    choice = device_choice.choose(file, options)
    if verbose:
        sys.stderr.write(f"{file.path} runs on {choice.backend}: {choice.why}\n")
    if choice.backend == "cpu" and file.repacked:
        raise TilebeamError(
            f'{file.path} is repacked for Tilebeam, the CPU backend cannot read it: use device="tilebeam", or '
            f"`gguf-repack unpack` it first."
        )
    ggml()  # the right llama-cpp-python, or a clear error, before anything else touches it
    refuse(file, options, choice.backend, device_choice.groups_of(file, choice.backend, options.n_gpu_layers))
    told, of_model, begun = progress or (lambda _: None), 1.0 if draft is None or head else _MODEL, 0.0

    def tell(share: float) -> None:
        told(of_model * share)

    tell(begun)
    if options.packed_cache and choice.backend == "npu" and file.repacked is None and options.n_gpu_layers < 0:
        begun = _PACKING
        file.packed = packed_files.find(
            file, options.packed_cache, verify=options.verify, progress=lambda share: tell(_PACKING * share)
        )
    with _loading, ExitStack() as stack, Interrupts() as interrupts:
        loader = _Loader(
            file, options, choice, stack, interrupts, lambda share: tell(begun + (1 - begun) * share), head
        )
        lm = loader.run()
    try:
        interrupts.check()
        tell(1.0)
        if draft is not None and head is None:
            lm.speculate(lookup, _load_draft(draft, lm, options, lambda share: told(of_model + (1 - of_model) * share)))
        elif lookup is not False:
            lm.speculate(lookup)
    except BaseException:
        lm.close()
        raise
    said = device_choice.warning(file.path, lm.info.matrices, choice, repacked=lm.info.repacked)
    if said is not None and device != "cpu":
        warnings.warn(said, PlacementWarning, stacklevel=2)
    return lm


def _beside(model: Model, info: LoadInfo, options: CheckedOptions, lora: Lora) -> LM:
    """Make another context of a loaded model; see `LM.beside`."""
    file, backend = inspect(info.path, False, [*info.lora, *files_and_scales(lora)]), info.device
    options = replace(options, hidden_layer=None)
    refuse(file, options, backend, info.matrices)
    with _loading, ExitStack() as stack, Interrupts() as interrupts:
        choice = Choice(backend, info.choice)
        return _Loader(file, options, choice, stack, interrupts, lambda _: None, None, (model, info)).run()


def _load_draft(draft: str | os.PathLike[str], lm: LM, o: CheckedOptions, progress: Callable[[float], object]) -> LM:
    """Load the draft model, with room for as many tokens and samples as the model has."""
    return load(
        draft,
        o.device,
        lm.n_ctx,
        o.n_seq_max,
        o.threads,
        n_batch=o.n_batch,
        executor=o.executor,
        flash_attn=o.flash_attn,
        swa_full=o.swa_full,
        lookup=False,
        packed_cache=o.packed_cache,
        verify=o.verify,
        verbose=o.verbose,
        progress=progress,
    )


class _Loader:
    """One load: every step puts what it made on the stack, so that a failure frees all of it."""

    def __init__(
        self,
        file: CheckedFile,
        options: CheckedOptions,
        choice: Choice,
        stack: ExitStack,
        interrupts: Interrupts,
        tell: Callable[[float], object],
        head: HeadFile | None,
        there: tuple[Model, LoadInfo] | None = None,
    ) -> None:
        import llama_cpp.llama_cpp as capi

        from tilebeam.native import llama

        self._c = capi
        self._llama = llama
        self._file = file
        self._o = options
        self._choice, self._backend = choice, choice.backend
        self._matrices = device_choice.groups_of(file, choice.backend, options.n_gpu_layers)
        self._there = there  # a loaded model, whose weights are used
        self._head, self._head_bytes = head, 0 if head is None else head.memory(options.n_ctx)
        self._stack = stack
        self._interrupts = interrupts
        self._tell = tell  # of the share that is loaded
        self._told: BaseException | None = None  # what it raised, within llama.cpp
        self._control: Control | None = None
        self._placement = Placement(())
        self._loaded = LoadResult(0, 0, 0, "")
        self._sessions: dict[int, int] = {}  # that devices had started when they had the weights
        self._most_outputs: int | None = None  # None: as many as fit into _LOGITS_BYTES
        self._kept = KEPT
        self._window_cells: int | None = None  # that layers with a sliding window get; None: as many as others
        self._limited = False  # a device maps a part of the address space only
        self._mapped = file.aligned

    def run(self) -> LM:
        from tilebeam.model.core import LoadInfo
        from tilebeam.model.lm import LM

        if self._backend == "npu":
            self._control = control()
            self._placement = self._place(self._control) if self._there is None else Placement(self._there[1].layers)
        texts = self._n_ids(1 if self._file.cache.recurrent else KEPT)
        self._window_cells = memory_check.window_cells(self._file, self._o, self._matrices, texts)
        spare = self._check_memory(texts, loaded=self._there is not None)
        copied = not self._limited and device_choice.copied(self._file, self._matrices, spare)
        self._mapped = self._file.aligned and not copied
        with self._session_options():
            model, context, tiled = self._start()
        if self._control is not None and self._npu_lost():
            reason = self._control.take_error() or "its process ended"
            raise NpuError(f"The NPU was lost while {self._file.path} was loaded: {reason}. Load the model again.")
        info = LoadInfo(
            path=self._file.path,
            device=self._backend,
            choice=self._choice.why,
            repacked=self._file.repacked is not None,
            tiled_tensors=tiled,
            n_ctx=context.n_ctx,
            n_batch=self._o.n_batch,
            n_ubatch=self._o.n_ubatch,
            n_seq_max=self._o.n_seq_max,
            threads=self._o.threads,
            executor=self._control.status()["executor"] if self._control else None,
            layers=self._placement.counts,
            lora=tuple((a.path, a.scale) for a in self._file.adapters),
            matrices=self._matrices,
            architecture=self._file.architecture,
            generates=self._file.generates,
            pooling=self._file.pooling,
            cache_ram=self._o.cache_ram,
            window=model.n_swa if model.n_swa < context.n_ctx else 0,
            window_cells=context.n_ctx if self._window_cells is None else self._window_cells,
            hidden_layer=self._o.hidden_layer,
            deterministic=self._o.deterministic,
            kernels=self._control.device_status(0)["isa"] if self._control else "",
        )
        head = None
        if self._head is not None:
            devices = [] if self._control is None else [self._control.device(0)]
            head = attach(self._head, context, devices, self._o.threads, self._stack)
        lm = LM(model, context, info, self._failure, self._stack.pop_all())
        lm.head = head
        lm.open_beside = partial(_beside, model, info, self._o)
        return lm

    def _check_memory(self, texts: int, *, loaded: bool = False) -> int:
        cells, head = self._window_cells, self._head_bytes
        return memory_check.check(self._file, self._o, self._matrices, texts, loaded=loaded, cells=cells, head=head)

    def _start(self) -> tuple[Any, Any, int]:
        """Load the model and make its context; return both, and how many tensors became tiles."""
        if self._there is None:
            model = self._logged("load the model", self._load_model)
            self._stack.callback(model.close)
        else:
            model = self._there[0]
        if self._control is not None:
            status = [self._control.device_status(i) for i in range(len(self._placement.counts))]
            self._sessions = {i: s["sessions"] for i, s in enumerate(status) if s["session"] != "none"}
        if model.kind_refused and (self._file.generates or model.kind_refused == "a diffusion model"):
            raise TilebeamError(
                f"{self._file.path} is {model.kind_refused}: Tilebeam runs models that write one token after the other."
            )
        tiled = self._check_loaded() if self._there is None else self._there[1].tiled_tensors
        if model.whole_forks_only:  # each sequence has a state of its own in every layer
            self._kept = 1
        adapters = []
        for lora in self._file.adapters:
            adapter = self._logged(f"apply the LoRA adapter {lora.path} to", partial(model.adapter, lora.path))
            self._stack.callback(adapter.close)
            adapters.append((adapter, lora.scale))
        n_outputs = self._n_outputs(model.vocab.size)
        self._check_memory(self._n_ids(), loaded=True)
        tap = self._tap(model)
        context = self._logged("make a context", lambda: self._make_context(model, n_outputs, tap))
        self._stack.callback(context.close)
        if adapters:
            self._logged("apply the LoRA adapters to", lambda: context.adapt(adapters) or None)
        if tap is not None:
            code, reason = context.try_taps()
            if code != 0:
                raise self._failure(code, "")
            if reason:
                what = "states of a layer" if self._head is None else "a draft head"
                raise TilebeamError(f"{self._file.path} cannot have {what}: {reason}.")
        if self._o.deterministic:
            assert self._control is not None
            check_deterministic(self._file, context, self._control, len(self._placement.counts), self._failure)
        return model, context, tiled

    def _place(self, npu: Control) -> Placement:
        """Decide which layers go to which device; one device for all if nothing else is asked for.

        Raises:
            TilebeamError: the model does not fit; the running sessions have other limits.
        """
        o, options = self._o, npu.options()
        limits = npu.limits(o.memory_limit) if o.memory_limit is not None else options["memory_limit"]
        rooms = []
        for d, limit in enumerate(limits):
            status = npu.device_status(d)
            alive = status["session"] == "alive"
            if alive and (o.devices is None or d < o.devices) and o.memory_limit and status["memory_limit"] != limit:
                raise TilebeamError(
                    f"{status['name']} already runs with memory_limit={status['memory_limit']}; close the models that "
                    "use it first."
                )
            limit = status["memory_limit"] if alive else limit
            rooms.append(max(1, limit - status["memory_used"]) if limit else 0)
        least = o.devices or 1
        if least == 1 and not any(rooms[: o.devices]):
            return Placement((self._file.weights.n_layer + 1,))
        if o.n_gpu_layers >= 0:
            raise TilebeamError("Several devices and memory limits need n_gpu_layers=-1: all layers on the NPU.")
        most = o.devices or (MAX_DEVICES if any(rooms) else 1)
        weights = self._file.weights

        def planner(n_outputs: int) -> Planner:
            # llama.cpp also plans for a token of every sequence, however small a batch may be.
            rows = max(o.n_ubatch, self._n_ids())
            kv_bytes = KV_BYTES[o.type_k] + KV_BYTES[o.type_v]
            return Planner(weights, Use(o.n_ctx, rows, min(rows, n_outputs), o.flash_attn, kv_bytes))

        most_outputs = self._n_outputs(weights.n_vocab)
        self._limited = any(rooms[:most])
        if not self._limited:
            return planner(most_outputs).place(rooms, least, most)
        # As few devices as do with the fewest rows of logits, of which llama.cpp wants one for every sequence; then as
        # many rows as these have room for.
        self._kept = 1
        found = planner(self._n_ids()).place(rooms, o.devices or 1, most)
        n_outputs = most_outputs
        while n_outputs > self._n_ids():
            roomy = planner(n_outputs).on(rooms[: len(found.counts)])
            if roomy is not None:
                found = roomy
                break
            n_outputs = max(self._n_ids(), n_outputs // 2)
        self._most_outputs = n_outputs
        return found

    def _load_model(self) -> Any:
        """Load the model, from the ordinary file if a packed one that is kept does not do."""
        if (packed := self._file.packed) is None:
            return self._load_file()
        model, whole = None, False
        with suppress(TilebeamError):
            model = self._load_file()
            whole = self._loaded.announced_tensors == len(packed.tensors) and not self._loaded.bad_buffers
        if whole or self._told is not None or self._interrupts.ends:
            return model
        npu, n_devices = self._control, len(self._placement.counts)
        died = npu is not None and any(npu.device_status(i)["session"] == "dead" for i in range(n_devices))
        unlike = model is not None
        if model is not None:
            model.close()
        self._file.packed = None
        self._check_memory(self._n_ids(1))
        model = self._load_file()
        if model is not None and not died:  # else it was not the packed file
            self._stack.callback(model.close)  # warnings may be errors
            packed_files.discard(packed, unlike=unlike)
        return model

    def _load_file(self) -> Any:
        c, npu, tiles = self._c, self._control, self._file.tiles
        devices = [] if npu is None else [npu.device(i) for i in range(len(self._placement.counts))]
        params = c.llama_model_default_params()
        array = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.cast(array, ctypes.c_void_p)
        params.n_gpu_layers = self._o.n_gpu_layers if devices else 0
        if len(devices) > 1:
            # Shares of the layers: with their very numbers llama.cpp's fractions fall on the borders.
            params.tensor_split = (ctypes.c_float * c.llama_max_devices())(*self._placement.counts)
        releases.map_files(params, self._mapped or tiles is not None)
        if tiles is not None:
            tiles.override(params)
        params.progress_callback = c.llama_progress_callback(self._goes_on)
        path, tensors = (None, ()) if tiles is None else (tiles.path, tiles.tensors)
        with nullcontext() if npu is None else npu.announced(path, tensors):
            pointer = own_load()(os.fsencode(path or self._file.path), params)
            if npu is not None:
                self._loaded = npu.loaded()
        return self._llama.Model(pointer) if pointer else None

    def _goes_on(self, share: float, _: Any) -> bool:
        """Tell how far llama.cpp has come; whether it is to go on."""
        try:
            self._tell(share)
        except BaseException as error:  # which ctypes would drop
            self._told = error
        return self._told is None and not self._interrupts.ends

    @contextmanager
    def _session_options(self) -> Iterator[None]:
        """Set the executor and the memory limit for the sessions that this load starts, not for later ones."""
        if (npu := self._control) is None:
            yield
            return
        executor, limit = self._o.executor, self._o.memory_limit
        for i in range(len(self._placement.counts)):
            status = npu.device_status(i)
            if status["session"] == "alive" and executor not in (None, status["executor"]):
                raise TilebeamError(
                    f'{status["name"]} already runs with executor="{status["executor"]}"; close the models that use '
                    "it first."
                )
        before, deterministic = npu.options(), self._o.deterministic
        npu.configure(
            executor=executor, memory_limit=limit, n_threads=self._o.threads, deterministic=deterministic or None
        )
        try:
            yield
        finally:
            npu.configure(**{name: before[name] for name in ("executor", "memory_limit", "deterministic")})

    def _check_loaded(self) -> int:
        """Count the tensors that this load tiled; refuse a repacked file unless they are all it lists."""
        made, wanted = self._loaded, len(self._file.tiles.tensors) if self._file.tiles else 0
        if made.bad_buffers:
            raise TilebeamError(f"{self._file.path} cannot be loaded: {made.reason}")
        if made.announced_tensors != wanted:
            raise TilebeamError(
                f"{self._file.path} lists {wanted} tiled tensors, the NPU has {made.announced_tensors}: the others "
                "would be read as something else, so the model is not used. Load it with n_gpu_layers=-1."
            )
        return made.tiled_tensors

    def _tap(self, model: Any) -> LayerTap | None:
        """Make what takes the hidden states behind the layer that was asked for.

        Raises:
            TilebeamError: this model has none such.
        """
        layer, head = self._o.hidden_layer, () if self._head is None else self._head.layers
        if layer is None and not head:
            return None
        if not self._file.generates:
            kind = f"an embedding model ({self._file.architecture})"
            asked = f"hidden_layer={layer}" if self._head is None else f"The draft head {self._head.path}"
            raise TilebeamError(f"{asked}: {kind} gives hidden states behind the final norm only.")
        if layer is not None and layer > model.n_layer - 2:
            raise TilebeamError(
                f"hidden_layer={layer}: {self._file.path} has {model.n_layer} layers, and the last gives hidden states "
                f"behind the final norm only: choose one from 0 to {model.n_layer - 2}, or None for those."
            )
        from tilebeam.native.layer_tap import LayerTap

        if self._head is not None:
            check_fits(self._head, self._file.path, model.n_embd, model.vocab.size, model.n_layer)
        layers = [n for n in dict.fromkeys((layer, *head)) if n is not None]
        architecture = self._file.architecture
        return LayerTap(layers, model.n_embd, self._o.n_batch, states=layer is not None, architecture=architecture)

    def _make_context(self, model: Any, n_outputs: int, tap: LayerTap | None) -> Any:
        c, o = self._c, self._o
        params = c.llama_context_default_params()
        params.n_ctx = o.n_ctx
        params.n_batch = max(o.n_batch, self._n_ids())
        params.n_ubatch = o.n_ubatch
        params.n_seq_max = self._n_ids()
        params.n_outputs_max = n_outputs
        # Beside the NPU the CPU backend only looks up embeddings, and workers that spin between such ops would take the
        # cores from the NPU; unless some weights must stay with it.
        on_device = all(group.device == "npu" for group in self._matrices)
        params.n_threads = params.n_threads_batch = 1 if on_device else o.threads
        params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED if o.flash_attn else c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k, params.type_v = _KV_TYPES[o.type_k], _KV_TYPES[o.type_v]
        params.embeddings = not self._file.generates
        # Hidden states of tokens (`LM.hidden`, `LM.embed`), also from files that ask for one value per sequence.
        ranks = self._file.pooling == "rank" and not self._file.generates
        params.pooling_type = c.LLAMA_POOLING_TYPE_RANK if ranks else c.LLAMA_POOLING_TYPE_NONE
        params.kv_unified = True
        params.swa_full = self._window_cells is None
        params.no_perf = True
        if tap is not None:
            params.cb_eval, params.cb_eval_user_data = tap.callback, tap.address
        pointer = c.llama_init_from_model(model.pointer, params)
        return self._llama.Context(pointer, model, o.n_batch, n_outputs, tap) if pointer else None

    def _n_outputs(self, n_vocab: int) -> int:
        """Return how many positions of one batch may have logits."""
        if not self._file.generates:
            return max(self._n_ids(), self._o.n_batch)
        return max(self._n_ids(), min(self._o.n_batch, self._most_outputs or _LOGITS_BYTES // (4 * n_vocab)))

    def _n_ids(self, most_kept: int = KEPT) -> int:
        """Count sequences: one per sample, those kept for others to go on from, and one that keeps a prompt."""
        return min(self._llama.MAX_SEQUENCES, (1 + min(self._kept, most_kept)) * self._o.n_seq_max + 1)

    def _logged(self, what: str, step: Callable[[], Any]) -> Any:
        """Run one step of llama.cpp with its log kept for the error text."""
        self._interrupts.check()
        if self._control is not None:
            self._control.take_error()
        with self._llama.log_router().capture() as log:
            result = step()
        if self._o.verbose:
            sys.stderr.write("".join(text for _, text in log))
        if result is None:
            if self._told is not None:
                raise self._told
            reasons = [self._llama.errors_in(log)]
            if self._control is not None:
                reasons.append(self._control.take_error())
            detail = "; ".join(r for r in reasons if r) or "no reason was given"
            kind = NpuError if self._npu_lost() else TilebeamError
            raise kind(f"llama.cpp could not {what} {self._file.path}: {detail}")
        return result

    def _npu_lost(self) -> bool:
        """Tell whether weights lie in a session that is gone: another one may have been started for what came
        behind."""
        if self._control is None:
            return False
        now = {i: self._control.device_status(i) for i in self._sessions}
        return any(now[i]["session"] == "dead" or now[i]["sessions"] != n for i, n in self._sessions.items())

    def _failure(self, code: int, log: str) -> TilebeamError:
        """Make the exception for a failed llama_decode."""
        if self._control is None:
            return TilebeamError(f"llama_decode failed with code {code}: {log or 'no reason was given'}")
        no_reason = f"llama_decode returned {code} and the NPU gave no reason"
        detail = self._control.last_error() or log or no_reason
        return NpuError(f"The NPU failed: {detail}. Load the model again to start a new session.")
