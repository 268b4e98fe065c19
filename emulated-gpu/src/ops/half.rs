//! The 16-bit float formats bf16 and f16: conversion from and to f32.

use super::rounding::Rounding;

/// The NaN that operations on bf16 and f16 return.
pub(super) const NAN: u16 = 0x7fff;

/// A 16-bit float format.
pub(super) trait Half {
    fn widen(bits: u16) -> f32;
    /// Rounds to nearest, ties to even.
    fn narrow(x: f32) -> u16;
    /// Rounds towards zero.
    fn cut(x: f32) -> u16;

    /// Rounds to nearest or towards zero. PTX has no other modes for these types.
    #[inline(always)]
    fn round(x: f32, rounding: Rounding) -> u16 {
        if rounding == Rounding::Zero { Self::cut(x) } else { Self::narrow(x) }
    }
}

/// bf16: the upper half of an f32.
pub(super) struct Brain;
/// f16: IEEE binary16.
pub(super) struct Binary16;

impl Half for Brain {
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        let bits = x.to_bits();
        // Adds half a unit in the last place of bf16 or, if the last bit is 0, slightly less. A carry rounds up.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        if x.is_nan() { NAN } else { (rounded >> 16) as u16 }
    }

    #[inline(always)]
    fn cut(x: f32) -> u16 {
        if x.is_nan() { NAN } else { (x.to_bits() >> 16) as u16 }
    }
}

impl Half for Binary16 {
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        let (sign, magnitude) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
        // Below 2^-14, the bits of an f16 count multiples of 2^-24. From 2^-14 on, the exponent biases of f32 and f16
        // differ by 112.
        let small = (magnitude as f32 * (1.0 / 16_777_216.0)).to_bits();
        let normal = (magnitude << 13) + (112 << 23);
        let special = (magnitude << 13) | 0x7f80_0000;
        let magnitude = if magnitude < 0x400 {
            small
        } else if magnitude < 0x7c00 {
            normal
        } else {
            special
        };
        f32::from_bits(sign | magnitude)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        let sign = (x.to_bits() >> 16 & 0x8000) as u16;
        let magnitude = x.abs();
        let bits = magnitude.to_bits();
        let small = (magnitude * 16_777_216.0).round_ties_even() as i32 as u16;
        let rounded = bits.wrapping_add(0xfff + (bits >> 13 & 1));
        let normal = (rounded.wrapping_sub(112 << 23) >> 13) as u16;
        // Magnitudes from 65,520 on round to infinity.
        let finite = if magnitude < 6.103_515_6e-5 { small } else { normal };
        let value = if magnitude < 65_520.0 { finite } else { 0x7c00 };
        if x.is_nan() { NAN } else { sign | value }
    }

    #[inline(always)]
    fn cut(x: f32) -> u16 {
        let sign = (x.to_bits() >> 16 & 0x8000) as u16;
        let magnitude = x.abs();
        let small = (magnitude * 16_777_216.0) as i32 as u16;
        let normal = (magnitude.to_bits().wrapping_sub(112 << 23) >> 13) as u16;
        let finite = if magnitude < 6.103_515_6e-5 { small } else { normal };
        let value = if magnitude < 65_536.0 {
            finite
        } else if magnitude < f32::INFINITY {
            0x7bff
        } else {
            0x7c00
        };
        if x.is_nan() { NAN } else { sign | value }
    }
}
