"""Differentiate what engines compute of a softmax, in tiles of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def locate(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target [R, 1], clamped into a tile, and whether it is
    inside.

    Args:
        targets: [R] the ids of tokens, counted from the first of the tile.
        width: columns of the tile.
    """
    return targets.clamp(0, width - 1)[:, None], (targets >= 0) & (targets < width)


def logit_slopes(
    log_p: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    of_entropy: tuple[Tensor | None, Tensor | None],
    of_squares: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Return the gradient [R, tile] of the scaled logits z. It overwrites ``log_p``.

    dz = g (onehot - p) for log-probs, -g p (log p + entropy) for the entropy, and 2 g p
    (p - s) for the sum s of squares. The last two come as pairs of g and the value.

    Args:
        log_p: [R, tile] log-probs over the whole vocabulary.
        targets: as in :func:`locate`.
        grad_logprobs: [R].
    """
    (grad_entropy, entropy), (grad_squares, squares) = of_entropy, of_squares
    if grad_entropy is None and grad_squares is None:
        grad = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        p, grad = log_p.exp(), log_p

        if grad_entropy is None or entropy is None:
            grad.zero_()
        else:
            grad.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_squares is not None and squares is not None:
            grad.add_((p - squares[:, None]).mul_(2 * grad_squares[:, None]))
        grad.sub_(grad_logprobs[:, None]).mul_(p)

    index, inside = locate(targets, grad.shape[1])
    return grad.scatter_add_(1, index, grad_logprobs.where(inside, 0.0)[:, None])
