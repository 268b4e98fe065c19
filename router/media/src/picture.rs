//! Pictures: JPEG, PNG and WebP become pixels.
//!
//! Dimensions are read from the header, and memory is taken for them, before any pixel is decoded. Of the metadata only
//! the orientation is read. Colours are not managed. Transparency is composed onto white, and of several pictures in a
//! file the first is taken, as in transformers.

use std::io::Cursor;

use png::{ColorType, Transformations};
use zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions};

use crate::{
    Budget, MediaError, Pixels, SizeError, budget::bytes, guarded, orientation::Orientation,
    resize::resize_until,
};

/// Bytes per pixel.
const CHANNELS: usize = 3;
/// Maximum number of scans of a progressive JPEG. Each may cost time without bytes. Usual files have ten.
const MAX_SCANS: usize = 40;
/// Memory in bytes for what a decoder keeps besides pixels, such as tables and chunks of metadata.
const OVERHEAD: usize = 4 << 20;
/// Bytes per pixel of the coefficients of a progressive JPEG: two for each of up to four components.
const COEFFICIENTS: usize = 8;
/// Bytes per pixel that a decoder of WebP uses besides those of the picture.
const WEBP_WORK: usize = 8;

/// A picture in canonical form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Height and width.
    pub size: Pixels,
    /// Pixels, `[height, width, 3]`.
    pub pixels: Vec<u8>,
}

/// A file whose header is read.
enum Opened<'a> {
    Jpeg(Box<zune_jpeg::JpegDecoder<ZCursor<&'a [u8]>>>),
    Png(Box<png::Reader<Cursor<&'a [u8]>>>),
    Webp(image_webp::WebPDecoder<Cursor<&'a [u8]>>),
}

/// Decodes a picture, and resizes it to the size that `size` gives for its own. `size` is asked before pixels are
/// decoded.
pub fn decode_picture(
    data: &[u8],
    budget: &mut Budget<'_>,
    size: impl FnOnce(Pixels) -> Result<Pixels, MediaError>,
) -> Result<Picture, MediaError> {
    guarded(|| decode(data, budget, size))
}

fn decode(
    data: &[u8],
    budget: &mut Budget<'_>,
    size: impl FnOnce(Pixels) -> Result<Pixels, MediaError>,
) -> Result<Picture, MediaError> {
    budget.holding(OVERHEAD, |budget| {
        let (mut opened, orientation, from) = Opened::open(data, budget)?;
        let shown = orientation.size(from);
        let to = size(shown)?;
        let canonical = bytes(&[to[0], to[1], CHANNELS]);
        budget.take(canonical)?;
        let work = opened.work(from).saturating_add(resize_work(shown, to, orientation));
        let pixels = budget.holding(work, |budget| {
            let pixels = opened.pixels(from, budget)?;
            budget.check_time()?;
            let pixels = if orientation.is_upright() { pixels } else { orientation.apply(&pixels, from) };
            if shown == to {
                return Ok(pixels);
            }
            let resized = resize_until(&pixels, shown, to, &|| budget.is_late());
            budget.check_time()?;
            resized.ok_or(MediaError::Failed)
        });
        match pixels {
            Ok(pixels) => Ok(Picture { size: to, pixels }),
            Err(error) => {
                budget.memory.give(canonical);
                Err(error)
            }
        }
    })
}

/// Bytes between the decoded pixels and the canonical ones: the picture turned, and resized in one direction.
fn resize_work(from: Pixels, to: Pixels, orientation: Orientation) -> usize {
    let turned = if orientation.is_upright() { 0 } else { bytes(&[from[0], from[1], CHANNELS]) };
    turned.saturating_add(bytes(&[from[0], to[1], CHANNELS]))
}

fn damaged(error: impl ToString) -> MediaError {
    MediaError::Damaged(error.to_string())
}

impl<'a> Opened<'a> {
    /// Reads the header: orientation and size in pixels, which are within the limit.
    fn open(data: &'a [u8], budget: &Budget<'_>) -> Result<(Self, Orientation, Pixels), MediaError> {
        let (opened, exif, width, height) = match data {
            [0xff, 0xd8, ..] => {
                let options = DecoderOptions::default()
                    .set_strict_mode(false)
                    .set_max_width(usize::MAX)
                    .set_max_height(usize::MAX)
                    .jpeg_set_max_scans(MAX_SCANS)
                    .jpeg_set_out_colorspace(ColorSpace::RGB);
                let mut decoder = zune_jpeg::JpegDecoder::new_with_options(ZCursor::new(data), options);
                decoder.decode_headers().map_err(damaged)?;
                let (width, height) = decoder.dimensions().ok_or(MediaError::Failed)?;
                let exif = decoder.exif().cloned();
                (Self::Jpeg(Box::new(decoder)), exif, width as u64, height as u64)
            }
            [0x89, b'P', b'N', b'G', ..] => {
                let limits = png::Limits { bytes: OVERHEAD };
                let mut decoder = png::Decoder::new_with_limits(Cursor::new(data), limits);
                decoder.set_ignore_text_chunk(true);
                decoder.set_ignore_iccp_chunk(true);
                decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
                let header = decoder.read_header_info().map_err(damaged)?;
                let (width, height) = header.size();
                // A line is allocated when the rest of the header is read.
                check_pixels(u64::from(width), u64::from(height), budget)?;
                let reader = decoder.read_info().map_err(damaged)?;
                let exif = reader.info().exif_metadata.as_ref().map(|block| block.to_vec());
                (Self::Png(Box::new(reader)), exif, u64::from(width), u64::from(height))
            }
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => {
                let mut decoder = image_webp::WebPDecoder::new(Cursor::new(data)).map_err(damaged)?;
                decoder.set_memory_limit(OVERHEAD);
                let exif = decoder.exif_metadata().ok().flatten();
                let (width, height) = decoder.dimensions();
                (Self::Webp(decoder), exif, u64::from(width), u64::from(height))
            }
            _ => return Err(MediaError::NoPicture),
        };
        check_pixels(width, height, budget)?;
        let orientation = exif.map(|block| Orientation::of_exif(&block)).unwrap_or_default();
        Ok((opened, orientation, [height as usize, width as usize]))
    }

    /// Bytes that decoding takes, with the pixels as RGB.
    fn work(&self, [height, width]: Pixels) -> usize {
        let per_pixel = match self {
            Self::Jpeg(_) => CHANNELS + COEFFICIENTS,
            // Up to four channels per pixel, and three of the picture.
            Self::Png(_) => 4 + CHANNELS,
            Self::Webp(_) => 4 + CHANNELS + WEBP_WORK,
        };
        bytes(&[height, width, per_pixel])
    }

    /// Decodes the pixels as RGB.
    fn pixels(&mut self, size: Pixels, budget: &Budget<'_>) -> Result<Vec<u8>, MediaError> {
        let rgb = bytes(&[size[0], size[1], CHANNELS]);
        match self {
            Self::Jpeg(decoder) => {
                if decoder.output_buffer_size() != Some(rgb) {
                    return Err(damaged("it has colours that are not known"));
                }
                let mut pixels = vec![0; rgb];
                decoder.decode_into(&mut pixels).map_err(damaged)?;
                Ok(pixels)
            }
            Self::Png(reader) => png_pixels(reader, size, budget),
            Self::Webp(decoder) => {
                let has_alpha = decoder.has_alpha();
                let mut pixels = vec![0; decoder.output_buffer_size().ok_or(MediaError::Failed)?];
                decoder.set_memory_limit(pixels.len().saturating_mul(2).saturating_add(OVERHEAD));
                decoder.read_image(&mut pixels).map_err(damaged)?;
                Ok(if has_alpha { on_white::<4>(&pixels).flatten().collect() } else { pixels })
            }
        }
    }
}

fn check_pixels(width: u64, height: u64, budget: &Budget<'_>) -> Result<(), MediaError> {
    let limit = budget.pixels;
    match width.checked_mul(height) {
        _ if width == 0 || height == 0 => Err(SizeError::Empty.into()),
        Some(pixels) if pixels <= limit => Ok(()),
        _ => Err(MediaError::TooManyPixels { width, height, limit }),
    }
}

/// Decodes a PNG line by line, or as a whole if its lines are interlaced.
fn png_pixels(
    reader: &mut png::Reader<Cursor<&[u8]>>,
    [height, width]: Pixels,
    budget: &Budget<'_>,
) -> Result<Vec<u8>, MediaError> {
    let (colour, _) = reader.output_color_type();
    let mut pixels = Vec::with_capacity(bytes(&[height, width, CHANNELS]));
    if reader.info().interlaced {
        let mut whole = vec![0; reader.output_buffer_size().ok_or(MediaError::Failed)?];
        reader.next_frame(&mut whole).map_err(damaged)?;
        push_rgb(&mut pixels, &whole, colour)?;
    } else {
        for _ in 0..height {
            budget.check_time()?;
            let line =
                reader.next_row().map_err(damaged)?.ok_or_else(|| damaged("it ends within its lines"))?;
            push_rgb(&mut pixels, line.data(), colour)?;
        }
    }
    match pixels.len() == bytes(&[height, width, CHANNELS]) {
        true => Ok(pixels),
        false => Err(damaged("it ends within its lines")),
    }
}

/// Appends samples of 8 bits as RGB.
fn push_rgb(pixels: &mut Vec<u8>, samples: &[u8], colour: ColorType) -> Result<(), MediaError> {
    match colour {
        ColorType::Rgb => pixels.extend_from_slice(samples),
        ColorType::Grayscale => pixels.extend(samples.iter().flat_map(|grey| [*grey; CHANNELS])),
        ColorType::GrayscaleAlpha => pixels.extend(on_white::<2>(samples).flatten()),
        ColorType::Rgba => pixels.extend(on_white::<4>(samples).flatten()),
        // Palettes are expanded.
        ColorType::Indexed => return Err(MediaError::Failed),
    }
    Ok(())
}

/// Composes samples of `N` channels, the last of which is the opacity, onto white, as Pillow's `alpha_composite` does.
/// Two channels are grey and opacity.
fn on_white<const N: usize>(samples: &[u8]) -> impl Iterator<Item = [u8; CHANNELS]> {
    /// Bits behind the point of a product.
    const PRECISION: u32 = 7;
    let (all, _) = samples.as_chunks::<N>();
    all.iter().map(|pixel| {
        let opacity = u32::from(pixel[N - 1]);
        let colours: [u8; CHANNELS] = std::array::from_fn(|channel| pixel[channel.min(N - 2)]);
        colours.map(|colour| {
            let mixed = (u32::from(colour) * opacity + 255 * (255 - opacity)) << PRECISION;
            let rounded = mixed + (0x80 << PRECISION);
            ((((rounded >> 8) + rounded) >> 8) >> PRECISION) as u8
        })
    })
}

#[cfg(test)]
pub(crate) mod tests;
