"""The block tables of running sequences: how they grow, how their blocks come to be shared, and what they give back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.scheduling.block import IntegrityError

if TYPE_CHECKING:
    from worker.scheduling.block_pool import BlockPool
    from worker.scheduling.line import Announcements, Line
    from worker.sequence import Sequence


class Tables:
    """Changes the block tables, and keeps pool and announcements in step with them."""

    def __init__(self, pool: BlockPool, announcements: Announcements) -> None:
        self._pool = pool
        self._announcements = announcements
        # Copies that are still to be made, by the block to be copied.
        self._sources: dict[int, int] = {}

    def start(self, sequence: Sequence, hits: list[int]) -> None:
        """Give an admitted sequence the table that it starts with; references on the hits have been taken.

        The last token is always computed, for the logits after it.
        """
        sequence.block_table = [*hits]
        sequence.num_computed = min(len(hits) * sequence.block_size, sequence.num_tokens - 1)
        sequence.num_sealed = sequence.num_computed // sequence.block_size
        self._announcements.announce(sequence, len(hits), sequence.num_tokens // sequence.block_size)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate what the next ``num_tokens`` tokens need. False, and no change, when the pool has too little.

        ::

            block_table  | b0 | b1 | b2 |             the next tokens go to the end of b2
            afterwards   | b0 | b1 | b2 | b3 |        if nobody else uses b2
                         | b0 | b1 | b4 | b3 |        copy (b2, b4), if others use b2, or it is offered to them
        """
        table, start = sequence.block_table, sequence.num_computed
        missing = sequence.blocks_for(start + num_tokens) - len(table)
        first = start // sequence.block_size
        source = table[first] if first < len(table) else None
        if source is None or self._pool.writable(source, self._sources.get(source, 0)):
            source = None
            if not missing:
                return True
        blocks = self._pool.allocate(missing + (source is not None), table)
        if blocks is None:
            return False
        if source is not None:
            sequence.copy = (source, blocks[0])
            self._sources[source] = self._sources.get(source, 0) + 1
            table[first] = blocks.pop(0)
        table += blocks
        return True

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """A step has computed a sequence's next tokens: offer the blocks that are full, give back superfluous ones."""
        block_size = sequence.block_size
        before = sequence.num_computed // block_size
        sequence.num_computed += num_tokens
        full = sequence.num_computed // block_size
        if full > before:
            self._announcements.drop(sequence, before, full)
            self._seal(sequence, full)
        if sequence.copy is not None and num_tokens:
            # Not before the copy was sealed: it may have turned out to be the block that it was made from.
            self._pool.free([self._drop_copy(sequence)])
        if len(sequence.block_table) * block_size >= sequence.num_computed + block_size:
            needed = sequence.blocks_for(sequence.num_computed)
            self._pool.free(sequence.block_table[needed:])
            del sequence.block_table[needed:]

    def give_back(self, sequence: Sequence) -> None:
        """Take all its blocks from a sequence."""
        self._announcements.withdraw(sequence)
        held = sequence.held()
        if sequence.copy is not None:
            self._drop_copy(sequence)
        self._pool.free(held)
        sequence.reset()

    def check_integrity(self, running: Line) -> None:
        """Between steps: raise IntegrityError unless these sequences explain all that pool and announcements say."""
        self._pool.check_integrity([sequence.held() for sequence in running])
        sources: dict[int, int] = {}
        for sequence in running:
            if sequence.copy is not None:
                sources[sequence.copy[0]] = sources.get(sequence.copy[0], 0) + 1
            if len(sequence.block_table) != sequence.blocks_for(sequence.num_computed):
                raise IntegrityError(f"{sequence} has a table that doesn't fit")
            if sequence.num_sealed > sequence.num_computed // sequence.block_size:
                raise IntegrityError(f"{sequence} has offered {sequence.num_sealed} blocks")
            for index, block in enumerate(sequence.block_table):
                hash_ = self._pool.hash_of(block)
                if hash_ is not None and (index >= sequence.num_sealed or hash_ != sequence.hashes[index]):
                    raise IntegrityError(f"{sequence} has block {block}, which is offered as something else")
        if sources != self._sources:
            raise IntegrityError(f"copies are to be made from {sources}, not from {self._sources}")
        self._announcements.check_integrity(running)

    def _drop_copy(self, sequence: Sequence) -> int:
        """A copy has been made, or will not be. Returns the block it was to be made from, which is still held."""
        if sequence.copy is None:
            raise IntegrityError(f"{sequence} has no copy to drop")
        source, _ = sequence.copy
        sequence.copy = None
        self._sources[source] -= 1
        if not self._sources[source]:
            del self._sources[source]
        return source

    def _seal(self, sequence: Sequence, full: int) -> None:
        """Offer a sequence's first ``full`` blocks. Where an equal one is offered already, that takes their place."""
        if sequence.private:
            return
        table, hashes = sequence.block_table, sequence.hash_blocks(full)
        for index in range(sequence.num_sealed, full):
            own = table[index]
            block = self._pool.seal(
                own,
                hashes[index],
                sequence.block_tokens(index),
                after=table[index - 1] if index else None,
                root=sequence.root,
            )
            if block is None:
                sequence.private = True
                self._announcements.withdraw(sequence)
                return
            if block != own:
                self._pool.share([block])
                self._pool.free([own])
                table[index] = block
            sequence.num_sealed = index + 1
