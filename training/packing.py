"""Documents of tokens become rows of equal length; no token is dropped."""

from collections.abc import Iterable, Iterator

Row = dict[str, list[int]]
IGNORED = -100  # the label that no loss counts


def pack(
    documents: Iterable[list[int]],
    length: int,
    *,
    bos: int | None = None,
    bos_every_piece: bool = True,
    eos: int | None = None,
    boundaries: bool = True,
    pad: int = 0,
) -> Iterator[Row]:
    """Fills rows with documents, one after the other; a document that does not fit goes on in the next row.

    With `boundaries` the positions of each piece of a document count from 0, which is how transformers' masks keep
    packed documents apart (without an attention mask and without a cache), and the first token of a piece is no
    target, since what stands before it belongs to another document. Without, a row is one text, whose first token is
    no target.

    Args:
        documents: token ids of each, without special tokens.
        length: tokens in a row, at least 2.
        bos: put before every piece of a document, or, without `bos_every_piece`, before its first one only.
        eos: put after every document.
        boundaries: keep documents apart.
        pad: fills a row's end when no piece fits there; it is no target.

    Yields:
        dict: `input_ids`, `labels` (`IGNORED` where there is no target) and, with `boundaries`, `position_ids`, each a
        list of `length` ints.

    Example:
        >>> for row in pack([[5, 6, 7], [8, 9]], 4, bos=1, eos=2):
        ...     print(row["input_ids"], row["labels"], row["position_ids"])
        [1, 5, 6, 7] [-100, 5, 6, 7] [0, 1, 2, 3]
        [1, 2, 1, 8] [-100, 2, -100, 8] [0, 1, 0, 1]
        [1, 9, 2, 0] [-100, 9, 2, -100] [0, 1, 2, 0]
    """
    pieces: list[list[int]] = []
    filled = 0
    for document in documents:
        rest = [*document, *([] if eos is None else [eos])]
        head = [] if bos is None else [bos]
        used = 0
        while used < len(rest):
            # A lone BOS, or a lone token that may not be predicted from what is before it, would teach nothing.
            if length - filled < max(len(head) + 1, 2 if boundaries else 1):
                yield _row(pieces, length, boundaries, pad)
                pieces, filled = [], 0
            taken = length - filled - len(head)
            pieces.append(head + rest[used : used + taken])
            filled += len(pieces[-1])
            used += taken
            head = head if bos_every_piece else []
    if pieces:
        yield _row(pieces, length, boundaries, pad)


def one_document_a_row(
    documents: Iterable[list[int]],
    length: int,
    *,
    bos: int | None = None,
    bos_every_piece: bool = True,
    eos: int | None = None,
) -> Iterator[Row]:
    """Gives every document rows of its own, of at most `length` tokens; they are padded when they meet in a batch.

    Args:
        documents, length, bos, bos_every_piece, eos: as in `pack`.

    Yields:
        dict: `input_ids` and `labels`, of the same length.

    Example:
        >>> [row["input_ids"] for row in one_document_a_row([[5, 6, 7], [8]], 3, bos=1)]
        [[1, 5, 6], [1, 7], [1, 8]]
    """
    for document in documents:
        rest = [*document, *([] if eos is None else [eos])]
        head = [] if bos is None else [bos]
        used = 0
        while used < len(rest):
            taken = length - len(head)
            piece = head + rest[used : used + taken]
            used += taken
            head = head if bos_every_piece else []
            yield {"input_ids": piece, "labels": [IGNORED, *piece[1:]]}


def _row(pieces: list[list[int]], length: int, boundaries: bool, pad: int) -> Row:
    ids = [token for piece in pieces for token in piece]
    missing = length - len(ids)
    texts = pieces if boundaries else [ids]
    labels = [label for text in texts for label in [IGNORED, *text[1:]]]
    row = {"input_ids": ids + [pad] * missing, "labels": labels + [IGNORED] * missing}
    if boundaries:
        lengths = [*map(len, pieces), missing]
        row["position_ids"] = [position for count in lengths for position in range(count)]
    return row
