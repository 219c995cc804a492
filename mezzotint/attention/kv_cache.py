"""The cache of keys and values for decoding: it is in rows, one per sequence, or in pages.

    params = InferenceParams(max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype)
    params.pre_step(OrderedDict({sequence id: number of new tokens}))     before each forward of the model
    y = layer(x, inference_params=params, self_attn_mask_type="padding_causal")

`pre_step` is plain Python and does all that depends on which sequences there are: the batch is in the order of its
argument, and sequences that it does not name are finished. `step`, inside the attention of each layer, writes new keys
and values. It reads only tensors, so one graph of it serves every step. No gradient goes through the cache.

With `dtype=torch.float8_e4m3fn` each head of each token is in FP8 with a scale of its own (`kv_codes.py`), and
attention reads its values in the dtype of the queries.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from mezzotint.attention.kv_codes import SCALE_BYTES, decode_heads, encode_heads
from mezzotint.attention.masks import check_qkv_format, packed_positions
from mezzotint.compat.kv_cache import PageQuestions
from mezzotint.layer.parameters import check_features, resolve_device
from mezzotint.tracing import call_untraced, lasting

LayerCache = tuple[torch.Tensor, torch.Tensor]


class KVCacheManager:
    """The base of cache managers: `cache[layer]` is (keys, values), and `sequences` holds the number of tokens of each
    sequence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cache: dict[int, LayerCache] = {}
        self.sequences: OrderedDict[int, int] = OrderedDict()

    def reset(self) -> None:
        """Forget every sequence."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        raise NotImplementedError

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> "OrderedDict[int, int]":
        """Take new sequences in and finished ones out, and return the number of tokens of each after the step."""
        raise NotImplementedError

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> LayerCache:
        """Write new keys and values, and return the layer's cache."""
        raise NotImplementedError


class _Cache(KVCacheManager):
    """This cache consists of blocks of tokens: `blocks[i, j]` says which block holds the tokens from j · block on of
    sequence i."""

    def __init__(
        self, num_blocks: int, block: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.num_blocks, self.block, self.shape = num_blocks, block, shape
        self.dtype, self.device = dtype, device

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate keys [blocks, tokens, heads, channels] and values, as zeros. In FP8 they are bytes, with the scale
        behind the channels."""
        heads, dim_k, dim_v = self.shape
        more, dtype = (SCALE_BYTES, torch.uint8) if self.dtype == torch.float8_e4m3fn else (0, self.dtype)
        with lasting():
            keys = torch.zeros(self.num_blocks, self.block, heads, dim_k + more, dtype=dtype, device=self.device)
            values = torch.zeros(self.num_blocks, self.block, heads, dim_v + more, dtype=dtype, device=self.device)
        self.cache[layer_number] = (keys, values)

    def blocks(self) -> torch.Tensor:
        """Return which blocks each sequence has, int [sequences, blocks of each]."""
        raise NotImplementedError

    def clear(self, blocks: Iterable[int]) -> None:
        """Fill the blocks of a finished sequence with zeros: a masked key counts 0, but 0 · NaN is NaN."""
        index = torch.tensor([*blocks], dtype=torch.int64, device=self.device)
        for layer in self.cache.values():
            for buffer in layer:
                buffer.index_fill_(0, index, 0)

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> LayerCache:
        new_k, new_v = new_k.detach(), new_v.detach()  # else the cache would hold the autograd graphs of all steps
        if qkv_format == "sbhd":
            new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
        size = new_k.shape[0]
        new, cached = cu_new_seqlens.diff(), cu_cached_seqlens.diff()
        if qkv_format == "thd":
            sequence, place = packed_positions(cu_new_seqlens, size)
        else:
            place = torch.arange(new_k.shape[1], device=new_k.device).repeat(size)
            sequence = torch.arange(size, device=new_k.device).repeat_interleave(new_k.shape[1])
            new_k, new_v = new_k.flatten(0, 1), new_v.flatten(0, 1)
        # Padding is not written: in its place the first token is written once more.
        source = torch.where(place < new[sequence], torch.arange(new_k.shape[0], device=new_k.device), 0)
        sequence, place = sequence[source], place[source]
        place = place + (cached - new)[sequence]
        target = self.blocks()[sequence, place // self.block] * self.block + place % self.block
        for buffer, fresh in zip(self.cache[layer_number], (new_k, new_v), strict=True):
            stored = encode_heads(fresh) if self.dtype == torch.float8_e4m3fn else fresh.to(buffer.dtype)
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, target.long(), stored[source])
        return self.cache[layer_number]


class NonPagedKVCacheManager(_Cache):
    """This cache has a row for each sequence of the batch, in the batch's order."""

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_heads, head_dim_k, head_dim_k if head_dim_v is None else head_dim_v)
        super().__init__(max_batch_size, max_seqlen, shape, dtype, resolve_device(device))
        self.rows = torch.arange(max_batch_size, device=self.device)[:, None]

    def blocks(self) -> torch.Tensor:
        return self.rows

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> "OrderedDict[int, int]":
        before = {name: row for row, name in enumerate(self.sequences)}
        finished = [row for name, row in before.items() if name not in step_dict]
        free = iter([*finished, *range(len(before), self.num_blocks)])
        order = [before[name] if name in before else next(free) for name in step_dict]
        order += [row for row in range(self.num_blocks) if row not in order]
        if finished:
            self.clear(finished)
        if order != [*range(self.num_blocks)]:
            index = torch.tensor(order, device=self.device)
            for layer in self.cache.values():
                for buffer in layer:
                    buffer.copy_(buffer[index])
        self.sequences = OrderedDict((name, self.sequences.get(name, 0) + new) for name, new in step_dict.items())
        return self.sequences


class PagedKVCacheManager(PageQuestions, _Cache):
    """This cache has pages, which sequences take as they grow and give back when they are finished."""

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_heads, head_dim_k, head_dim_k if head_dim_v is None else head_dim_v)
        super().__init__(total_num_pages, page_size, shape, dtype, resolve_device(device))
        self.max_pages_per_seq = max_seqlen // page_size
        self.page_table = torch.zeros(max_batch_size, self.max_pages_per_seq, dtype=torch.int32, device=self.device)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.free_pages = [*range(self.num_blocks)]
        self.allocated_pages: dict[int, list[int]] = {}
        self.page_table.zero_()

    def blocks(self) -> torch.Tensor:
        return self.page_table

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> "OrderedDict[int, int]":
        lengths = OrderedDict((name, self.sequences.get(name, 0) + new) for name, new in step_dict.items())
        finished = [name for name in self.allocated_pages if name not in step_dict]
        needed = sum(max(0, self._missing_pages(name, length)) for name, length in lengths.items())
        free = len(self.free_pages) + sum(map(self.get_page_count, finished))
        if needed > free:
            raise RuntimeError(
                f"the cache has {free} free pages, this step needs {needed}: finish sequences first, or give more than "
                f"total_num_pages={self.num_blocks}"
            )
        self._take_back(finished)
        for name, length in lengths.items():
            self.allocate_sequence(name, length)
        self.sequences = lengths
        self.allocated_pages = {name: self.allocated_pages[name] for name in lengths}  # in the order of the batch
        self.page_table[: len(lengths)].copy_(self.get_page_table(lengths))
        return self.sequences

    def allocate_page(self, seq: int) -> None:
        """Give a sequence one more page."""
        if self.get_page_count(seq) == self.max_pages_per_seq:
            raise ValueError(
                f"sequence {seq} has {self.max_pages_per_seq} pages of {self.block} tokens, which is all that one may "
                "have: give a larger max_seqlen"
            )
        if not self.free_pages:
            raise RuntimeError(
                f"sequence {seq} needs a page, and none of {self.num_blocks} is free: finish sequences first, or give "
                "more total_num_pages"
            )
        self.allocated_pages.setdefault(seq, []).append(self.free_pages.pop(0))

    def allocate_sequence(self, seq: int, context_len: int) -> None:
        """Give a sequence the pages that `context_len` tokens need; `pre_step` does it for each sequence of the
        batch."""
        self.allocated_pages.setdefault(seq, [])
        for _ in range(self._missing_pages(seq, context_len)):
            self.allocate_page(seq)

    def deallocate_sequence(self, seq: int) -> None:
        """Take all pages of a sequence back, and forget it; `pre_step` does it for those that it does not name."""
        if seq not in self.allocated_pages:
            raise KeyError(f"sequence {seq} is not in the cache, which has {sorted(self.allocated_pages)}")
        self._take_back([seq])
        self.sequences.pop(seq, None)

    def _missing_pages(self, seq: int, length: int) -> int:
        """Return how many pages a sequence of `length` tokens lacks."""
        return -(-length // self.block) - self.get_page_count(seq)

    def _take_back(self, sequences: list[int]) -> None:
        pages = [page for seq in sequences for page in self.allocated_pages.pop(seq)]
        if pages:
            self.clear(pages)
        self.free_pages += pages


class InferenceParams:
    """An `InferenceParams` holds what a model needs to decode: the cache of keys and values, and how long each sequence
    of the batch is.

    `cu_seqlens_q` counts the new tokens of a step, `cu_seqlens_kv` all tokens, both int32 [max_batch_size + 1]; rows of
    the batch behind the last sequence have none.

    Args:
        max_batch_size: How many sequences there may be at once.
        max_sequence_length: How many tokens a sequence may have.
        num_heads_kv: The number of heads of keys and values. It must be given.
        head_dim_k: The number of channels of a key. It must be given.
        dtype: The dtype of keys and values. It must be given. `torch.float8_e4m3fn` keeps them in FP8, with an FP32
            scale for each head of each token: about half of BF16's memory, and an error of at most a sixteenth of each
            element (`mezzotint/attention/kv_codes.py` has the bound).
        head_dim_v: The number of channels of a value, or None for that of a key.
        is_paged: Whether the cache is made of pages that sequences share. The default is False.
        total_num_pages: The number of pages, if there are pages.
        page_size: The number of tokens of a page, a divisor of `max_sequence_length`.
        max_ctx_len: It is kept as an attribute and has no effect.
        qkv_format: The order of dimensions of the new keys and values. The default is "bshd".
        custom_cache_manager: A class that is used instead of those here, or None.
        device: The device of the cache. None means PyTorch's default device, or the GPU if that is the CPU and there is
            a GPU.

    Raises:
        ValueError: If a size or the dtype is missing or cannot be, or pages do not divide sequences.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> cache = mz.InferenceParams(2, 32, num_heads_kv=4, head_dim_k=16, dtype=torch.float32, device="cpu")
        >>> attention = mz.DotProductAttention(4, 16, qkv_format="bshd", attn_mask_type="padding_causal")
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)
        >>> cache.pre_step({0: 8, 1: 8})
        >>> attention(q, k, v, inference_params=cache).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_features(max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)
        check_features(num_heads_kv=num_heads_kv, head_dim_k=head_dim_k)
        if dtype is None:
            raise ValueError("dtype is None: give the dtype of keys and values, such as torch.bfloat16")
        if dtype.itemsize == 1 and dtype != torch.float8_e4m3fn:
            raise ValueError(f"dtype is {dtype}: of 8 bits a cache has torch.float8_e4m3fn only")
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.is_paged, self.total_num_pages, self.page_size = is_paged, total_num_pages, page_size
        self.max_ctx_len = max_ctx_len
        self.input_qkv_format, self.cache_qkv_format = qkv_format, "bshd"
        self.device = resolve_device(device)
        options: dict[str, Any] = {
            "max_batch_size": max_batch_size,
            "max_seqlen": max_sequence_length,
            "num_heads": num_heads_kv,
            "head_dim_k": head_dim_k,
            "dtype": dtype,
            "head_dim_v": self.head_dim_v,
        }
        if is_paged:
            check_features(total_num_pages=total_num_pages, page_size=page_size)
            options |= {"total_num_pages": total_num_pages, "page_size": page_size}
            if max_sequence_length % options["page_size"]:
                raise ValueError(f"max_sequence_length={max_sequence_length} is no multiple of page_size={page_size}")
        if custom_cache_manager is not None:
            self.cache_manager = custom_cache_manager(**options)
        else:
            manager: Any = PagedKVCacheManager if is_paged else NonPagedKVCacheManager
            self.cache_manager = manager(**options, device=self.device)
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.batch_size = 0
        self.new_tokens: tuple[int, ...] = ()  # one for each sequence of the batch
        self.owners: dict[int, int] = {}  # layer → id of the attention that writes to it
        self.cu_seqlens_q = torch.zeros(max_batch_size + 1, dtype=torch.int32, device=self.device)
        self.cu_seqlens_kv = torch.zeros(max_batch_size + 1, dtype=torch.int32, device=self.device)
        self.pre_step_seqlens = torch.zeros(max_batch_size, dtype=torch.int32, device=self.device)

    def reset(self) -> None:
        """Forget every sequence; memory stays allocated."""
        self.sequences, self.batch_size, self.new_tokens = OrderedDict(), 0, ()
        self.owners.clear()
        self.cache_manager.reset()
        for buffer in (self.cu_seqlens_q, self.cu_seqlens_kv, self.pre_step_seqlens):
            buffer.zero_()

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the memory of a layer's keys and values. A layer does it in its first forward; in compiled code that
        costs a second graph."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> None:
        """Set, before a forward, which sequences are in the batch, and how many new tokens each has."""
        if not step_dict or len(step_dict) > self.max_batch_size:
            raise ValueError(
                f"step_dict has {len(step_dict)} sequences: give 1 to max_batch_size={self.max_batch_size}"
            )
        for name, new in step_dict.items():
            length = self.sequences.get(name, 0) + new
            if new < 1 or length > self.max_sequence_length:
                raise ValueError(
                    f"sequence {name} has {new} new tokens and then {length}: give at least one, and at most "
                    f"max_sequence_length={self.max_sequence_length} in all"
                )
        self.sequences = OrderedDict(self.cache_manager.pre_step(OrderedDict(step_dict)))
        self.batch_size, self.new_tokens = len(step_dict), tuple(step_dict.values())
        before = [self.sequences[name] - new for name, new in step_dict.items()]
        self._write(self.pre_step_seqlens, before, 0)
        self._write(self.cu_seqlens_q[1:], _sums(step_dict.values()))
        self._write(self.cu_seqlens_kv[1:], _sums(self.sequences.values()))

    def _write(self, buffer: torch.Tensor, values: list[int], rest: int | None = None) -> None:
        """Write values to a buffer in place, so that a graph reads the same tensor at every step. The rest of it is
        filled with `rest`, or with the last value if that is None."""
        filled = values + [values[-1] if rest is None else rest] * (buffer.shape[0] - len(values))
        buffer.copy_(torch.tensor(filled, dtype=buffer.dtype))

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """Return how many tokens each sequence had before this step, int32 [max_batch_size]."""
        return self.pre_step_seqlens

    def convert_paged_to_nonpaged(
        self, layer_number: int, batch_size: int | None = None, dtype: torch.dtype = torch.float32
    ) -> LayerCache:
        """Return the keys and values of the batch, gathered from its pages: [batch, max_sequence_length, heads,
        channels]. Those that are cached in FP8 are returned in `dtype`, others in the dtype of the cache."""
        table = self.cache_manager.page_table[: self.batch_size if batch_size is None else batch_size].long()
        keys, values = self.cache_manager.cache[layer_number]
        return self._read(keys[table].flatten(1, 2), dtype), self._read(values[table].flatten(1, 2), dtype)

    def _read(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what the cache holds: values in `dtype` if it holds bytes of FP8."""
        return decode_heads(stored, dtype) if stored.dtype == torch.uint8 else stored

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, str]:
        """Write a layer's new keys and values, which are in `qkv_format`, to the cache.

        Return the keys and values of the layer's cache (only the rows of the batch if it has rows), `cu_seqlens_q` and
        `cu_seqlens_kv`, how many tokens a sequence can have, and the formats of queries and cache: "bshd", "sbhd_2bshd"
        or "thd_2bshd". Rows in FP8 are returned in the dtype of the new keys, pages as they are stored.
        """
        check_qkv_format("qkv_format", qkv_format)
        self._check_heads(new_k, new_v)
        call_untraced(_check_tokens, self, tuple(new_k.shape), qkv_format)  # a graph serves other steps too
        keys, values = self.cache_manager.step(
            layer_number, new_k, new_v, self.cu_seqlens_q, self.cu_seqlens_kv, qkv_format
        )
        if not self.is_paged and qkv_format != "thd":
            batch = new_k.shape[0 if qkv_format == "bshd" else 1]
            keys, values = keys[:batch], values[:batch]
        if not self.is_paged:
            keys, values = self._read(keys, new_k.dtype), self._read(values, new_k.dtype)
        both = "bshd" if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        return keys, values, self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length, both

    def _check_heads(self, new_k: torch.Tensor, new_v: torch.Tensor) -> None:
        for name, tensor, channels in (("keys", new_k, self.head_dim_k), ("values", new_v, self.head_dim_v)):
            if tuple(tensor.shape[-2:]) != (self.num_heads_kv, channels):
                raise ValueError(
                    f"{name} have shape {tuple(tensor.shape)}: inference_params was made for {self.num_heads_kv} heads "
                    f"of {channels} channels"
                )

    def __repr__(self) -> str:
        kind = (
            f"total_num_pages={self.total_num_pages}, page_size={self.page_size}"
            if self.is_paged
            else f"max_batch_size={self.max_batch_size}, max_sequence_length={self.max_sequence_length}"
        )
        return (
            f"InferenceParams({kind}, num_heads_kv={self.num_heads_kv}, head_dim_k={self.head_dim_k}, "
            f"head_dim_v={self.head_dim_v}, dtype={self.dtype})"
        )


def _sums(lengths: Iterable[int]) -> list[int]:
    sums, total = [], 0
    for length in lengths:
        total += length
        sums.append(total)
    return sums


def claim_layer(params: InferenceParams, layer_number: int, owner: Any) -> None:
    """Check, before a `step`, that a layer of the cache is written by one attention only; for a graph this happens
    while it is traced."""
    if params.owners.setdefault(layer_number, id(owner)) != id(owner):
        raise ValueError(
            f"layer_number is {layer_number} in two attentions, which write over each other's keys: give each "
            "its own, and call inference_params.reset() before another model uses it"
        )


def _check_tokens(params: InferenceParams, shape: tuple[int, ...], qkv_format: str) -> None:
    """Check that there are as many new keys as `pre_step` was told, or more, which are padding."""
    if not params.batch_size:
        raise ValueError("inference_params has no sequences: call its pre_step before each forward of the model")
    sizes = shape[1::-1] if qkv_format == "sbhd" else shape[:2]
    told = [params.batch_size, max(params.new_tokens)]
    if qkv_format == "thd":
        sizes, told = sizes[:1], [sum(params.new_tokens)]
    if any(size < count for size, count in zip(sizes, told, strict=True)):
        raise ValueError(
            f"keys have shape {shape} in {qkv_format!r}: inference_params.pre_step was told of "
            f"{list(params.new_tokens)} new tokens; give them all"
        )
