//! Vectors as arrays: the specification, and what architectures other than x86-64 run.

use std::ops::{Add, BitAnd, BitOr};

use super::{LANES, ROW};
use crate::{TAGS_PER_LINE, equal_tags};

/// Eight 32-bit numbers.
#[derive(Clone, Copy, Debug)]
pub struct U32x8([u32; LANES]);

impl U32x8 {
    #[inline]
    pub(super) fn splat(value: u32) -> Self {
        Self([value; LANES])
    }

    #[inline]
    pub(super) fn load(lanes: &[u32; LANES]) -> Self {
        Self(*lanes)
    }

    #[inline]
    pub(super) fn columns(rows: &[&[u8; ROW]; LANES]) -> [Self; LANES] {
        std::array::from_fn(|column| {
            Self(rows.map(|row| {
                let at = 4 * column;
                u32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]])
            }))
        })
    }

    #[inline]
    pub(super) fn equal_tags(tags: &[u16; TAGS_PER_LINE], tag: u16) -> u32 {
        equal_tags(tags, tag)
    }

    /// The lanes.
    #[inline]
    pub fn to_array(self) -> [u32; LANES] {
        self.0
    }

    /// All ones in lanes that are equal, else zero.
    #[inline]
    #[must_use]
    pub fn equals(self, other: Self) -> Self {
        self.combine(other, |a, b| if a == b { u32::MAX } else { 0 })
    }

    /// All ones in lanes that are greater, else zero. The numbers are below 2^31.
    #[inline]
    #[must_use]
    pub fn is_greater(self, other: Self) -> Self {
        self.combine(other, |a, b| if a > b { u32::MAX } else { 0 })
    }

    /// Lanes whose highest bit is set, as bits.
    #[inline]
    pub fn lanes(self) -> u8 {
        self.0.iter().enumerate().fold(0, |bits, (i, lane)| bits | ((lane >> 31) as u8) << i)
    }

    /// Each lane, shifted.
    #[inline]
    #[must_use]
    pub fn shift_right<const BITS: i32>(self) -> Self {
        Self(self.0.map(|lane| lane >> BITS))
    }

    /// Each lane, shifted.
    #[inline]
    #[must_use]
    pub fn shift_left<const BITS: i32>(self) -> Self {
        Self(self.0.map(|lane| lane << BITS))
    }

    #[inline]
    fn combine(self, other: Self, with: impl Fn(u32, u32) -> u32) -> Self {
        Self(std::array::from_fn(|i| with(self.0[i], other.0[i])))
    }
}

impl BitAnd for U32x8 {
    type Output = Self;

    #[inline]
    fn bitand(self, other: Self) -> Self {
        self.combine(other, |a, b| a & b)
    }
}

impl BitOr for U32x8 {
    type Output = Self;

    #[inline]
    fn bitor(self, other: Self) -> Self {
        self.combine(other, |a, b| a | b)
    }
}

/// Modulo 2^32.
impl Add for U32x8 {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        self.combine(other, u32::wrapping_add)
    }
}
