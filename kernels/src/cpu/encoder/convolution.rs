//! Gathering of the inputs of a convolution of 3 × 3 pixels.

use crate::PixelGrid;

/// Elements of a window, per channel.
pub(in crate::cpu) const WINDOW: usize = 9;

/// Gathers the window of one output pixel, whose index among the pixels of `grid.halved()` is `index`. `x` has
/// `channels` elements per pixel of `grid`. `out` is `[channels, 3, 3]`.
pub(in crate::cpu) fn gather(grid: PixelGrid, x: &[f32], channels: usize, index: usize, out: &mut [f32]) {
    let halved = grid.halved();
    let (column, line) = (index % halved.width, index / halved.width % halved.height);
    let first = index / (halved.width * halved.height) * grid.height * grid.width;
    for (element, (down, right)) in (0..3).flat_map(|down| (0..3).map(move |right| (down, right))).enumerate()
    {
        // The window begins one pixel above and one pixel left of its centre.
        let pixel = (2 * line + down)
            .checked_sub(1)
            .zip((2 * column + right).checked_sub(1))
            .filter(|&(line, column)| line < grid.height && column < grid.width)
            .map(|(line, column)| first + line * grid.width + column);
        let to = out[element..].iter_mut().step_by(WINDOW);
        match pixel {
            Some(pixel) => to.zip(&x[pixel * channels..][..channels]).for_each(|(to, from)| *to = *from),
            None => to.for_each(|to| *to = 0.0),
        }
    }
}
