"""Learns the linear map from a VAE's latents to colours, from clips that it has decoded.

Knows: least squares, and which pixels a latent stands for. Does not know: tables that ship with the package,
pictures, or jobs. Sums over the first few clips are kept, so that later ones refine the map.
"""

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.frames import Frames
from pipelines.projections import Projection, Rgb

CLIPS = 8  # each of another content: after these a further one changes little
POINTS = 4096  # of each clip; a map has a few dozen unknowns
# Of the number of points. Normalised latents vary by about 1, so this shrinks no more than the directions in
# which hardly anything varied yet: they would get factors of any size.
RIDGE = 1e-3

Values = NDArray[np.float64]


class ColourLearner:
    """What the clips of one VAE have taught. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clips = 0
        self._points = 0
        self._products: Values | None = None  # [C + 1, C + 1]; the last row and column are the bias's
        self._targets: Values | None = None  # [C + 1, 3]
        self._projection: Projection | None = None

    @property
    def projection(self) -> Projection | None:
        """The map, or None before the first clip."""
        return self._projection

    @property
    def is_done(self) -> bool:
        """Whether a further clip would be of no use."""
        return self._clips >= CLIPS

    def learn(
        self,
        latents: torch.Tensor,
        frames: Frames,
        *,
        vae_temporal: int,
        latents_mean: tuple[float, ...],
        latents_std: tuple[float, ...],
    ) -> None:
        """Take normalised latents [1, C, T, h, w] and the frames [F, H, W, 3] that they were decoded to.

        Raises:
            ValueError: the frames are not whole blocks of pixels, one for each latent.
        """
        inputs, colours = examples(latents, frames, vae_temporal)
        with self._lock:
            if self.is_done:
                return
            products, targets = inputs.T @ inputs, inputs.T @ colours
            if self._products is not None and self._targets is not None:
                products, targets = products + self._products, targets + self._targets
            self._products, self._targets = products, targets
            self._points += len(inputs)
            self._clips += 1
            solution = _ridge(products, targets, self._points)
            self._projection = Projection(
                vae="learned",
                source=f"least squares on {self._clips} decoded clips",
                latents_mean=latents_mean,
                latents_std=latents_std,
                factors=tuple(_rgb(row) for row in solution[:-1]),
                bias=_rgb(solution[-1]),
            )


def examples(latents: torch.Tensor, frames: Frames, vae_temporal: int) -> tuple[Values, Values]:
    """Up to POINTS latents and a 1 [N, C + 1], and the mean colours [N, 3], -1 to 1, of their pixels.

    The first latent frame stands for one frame, each later one for ``vae_temporal``.
    """
    channels, *grid = latents.shape[1:]
    time, height, width = grid
    # The same points for clips of one shape: what differs between them is the clip.
    points = np.random.default_rng(0).permutation(time * height * width)[:POINTS]
    where = torch.from_numpy(points).to(latents.device)
    chosen = latents[0].reshape(channels, -1)[:, where].T.double().cpu().numpy()
    inputs = np.concatenate([chosen, np.ones((len(points), 1))], 1)
    t, y, x = np.unravel_index(points, grid)
    colours = np.empty((len(points), 3))
    first = t == 0
    colours[first] = _means(frames[:1], (1, height, width), (t[first], y[first], x[first]))
    if time > 1:
        rest = ~first
        grid_of_rest = (time - 1, height, width)
        colours[rest] = _means(frames[1:], grid_of_rest, (t[rest] - 1, y[rest], x[rest]), vae_temporal)
    return inputs, colours / 127.5 - 1


def _means(
    frames: Frames,
    grid: tuple[int, int, int],
    cells: tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]],
    frames_each: int = 1,
) -> Values:
    """Mean colours [N, 3] of some cells of frames cut into a grid [T, h, w]."""
    time, height, width = grid
    count, rows, columns, _ = frames.shape
    if count != time * frames_each or rows % height or columns % width:
        raise ValueError(f"{count} frames of {columns}x{rows} are no {frames_each} for each latent of {grid}")
    blocks = frames.reshape(time, frames_each, height, rows // height, width, columns // width, 3)
    t, y, x = cells
    means: Values = blocks[t, :, y, :, x].mean((1, 2, 3)).astype(np.float64)
    return means


def _ridge(products: Values, targets: Values, points: int) -> Values:
    penalty = np.full(len(products), RIDGE * points)
    penalty[-1] = 0  # the bias may be anything
    solution: Values = np.linalg.solve(products + np.diag(penalty), targets).astype(np.float64)
    return solution


def _rgb(row: Values) -> Rgb:
    red, green, blue = row.tolist()
    return red, green, blue
