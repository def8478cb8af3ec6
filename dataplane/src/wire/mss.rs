//! MSS clamping: lowers the MSS option of a SYN (RFC 9293 section 3.7.1), for paths on which path MTU discovery fails.

use super::checksum::Delta;
use super::{set_u16, tcp, u16_at};

const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;

/// Lowers the MSS option to at most `max_mss` and updates the checksum. A segment without the option is unchanged.
pub fn clamp(segment: &mut [u8], max_mss: u16) {
    let Some(length) = segment.get(12).map(|offset| usize::from(offset >> 4) * 4) else { return };
    let mut at = tcp::HEADER;
    while at + 4 <= length && length <= segment.len() {
        match (segment[at], segment[at + 1]) {
            (END, _) => return,
            (NOP, _) => at += 1,
            (MSS, 4) => {
                let announced = u16_at(segment, at + 2);
                if announced > max_mss {
                    // At an odd offset the value spans two checksum words: its bytes count swapped.
                    let swap = |word: u16| if at.is_multiple_of(2) { word } else { word.swap_bytes() };
                    let delta = Delta::of(swap(announced).into(), swap(max_mss).into());
                    let checksum = delta.apply(u16_at(segment, tcp::CHECKSUM));
                    set_u16(segment, at + 2, max_mss);
                    set_u16(segment, tcp::CHECKSUM, checksum);
                }
                return;
            }
            (_, length) if length >= 2 => at += usize::from(length),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::checksum;

    fn syn(options: &[u8]) -> Vec<u8> {
        let mut segment = vec![0; 20];
        segment[12] = ((20 + options.len()) as u8 / 4) << 4;
        segment[13] = 2;
        segment.extend(options);
        let sum = checksum::checksum(0, &segment);
        segment[16..18].copy_from_slice(&sum.to_be_bytes());
        segment
    }

    #[test]
    fn a_larger_mss_is_lowered_at_any_offset() {
        for options in [&[2, 4, 5, 0xb4][..], &[1, 2, 4, 5, 0xb4, 0, 0, 0], &[3, 3, 7, 2, 4, 5, 0xb4, 0]] {
            let mut segment = syn(options);
            clamp(&mut segment, 1360);
            assert!(checksum::verifies(0, &segment), "{options:?}");
            assert!(segment[20..].windows(4).any(|option| option == [2, 4, 5, 0x50]), "{segment:?}");
            let before = segment.clone();
            clamp(&mut segment, 1400);
            assert_eq!(segment, before, "never raised");
        }
    }

    #[test]
    fn a_segment_with_malformed_or_missing_options_is_unchanged() {
        for options in [&[][..], &[3, 0, 2, 4], &[2, 3, 5, 0xb4], &[0, 2, 4, 9], &[8, 40, 2, 4]] {
            let mut segment = syn(options);
            let before = segment.clone();
            clamp(&mut segment, 10);
            assert_eq!(segment, before, "{options:?}");
        }
        clamp(&mut [], 10);
        clamp(&mut [0xff; 20], 10);
    }
}
