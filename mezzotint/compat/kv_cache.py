"""This module answers questions about the pages of a cache of keys and values, by Transformer Engine's names."""

from collections import OrderedDict
from collections.abc import Iterable

import torch


class PageQuestions:
    """This mixin tells for the manager of pages which sequence has which pages, and how many are free."""

    allocated_pages: dict[int, list[int]]
    free_pages: list[int]
    page_table: torch.Tensor
    max_pages_per_seq: int
    sequences: "OrderedDict[int, int]"

    def has_free_page(self) -> bool:
        """Return whether a page is left."""
        return bool(self.free_pages)

    def get_sequence_count(self) -> int:
        """Return how many sequences the cache holds."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """Return how many tokens each sequence in the cache has, in the order of the sequences."""
        return list(self.sequences.values())

    def get_page_count(self, seq: int) -> int:
        """Return how many pages a sequence has."""
        return len(self.get_page_list(seq))

    def get_page_list(self, seq: int) -> list[int]:
        """Return the numbers of a sequence's pages, in the order of its tokens."""
        return list(self.allocated_pages.get(seq, []))

    def get_page_table(self, sequences: Iterable[int]) -> torch.Tensor:
        """Return the pages of several sequences, int32 [sequences, pages], with zeros behind the last page of each."""
        lists = [self.get_page_list(seq) for seq in sequences]
        rows = [pages + [0] * (self.max_pages_per_seq - len(pages)) for pages in lists]
        table = torch.tensor(rows, dtype=torch.int32, device=self.page_table.device)
        return table.view(len(rows), self.max_pages_per_seq)

    def print_cache(self) -> None:
        """Print the sequences with their lengths and pages, and how many pages are free."""
        for seq, length in self.sequences.items():
            print(f"sequence {seq}: {length} tokens, pages {self.get_page_list(seq)}")
        print(f"{len(self.free_pages)} free pages")
