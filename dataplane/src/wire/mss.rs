//! The maximum segment size that a SYN announces (RFC 9293 section 3.7.1), made smaller where a path loses packets that tell
//! senders to send less.

use super::checksum::Delta;
use super::{set_u16, tcp, u16_at};

const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;

/// Makes the announced size at most `most`; the checksum follows. A segment without the option stays as it is.
pub fn clamp(segment: &mut [u8], most: u16) {
    let Some(length) = segment.get(12).map(|offset| usize::from(offset >> 4) * 4) else { return };
    let mut at = tcp::HEADER;
    while at + 4 <= length && length <= segment.len() {
        match (segment[at], segment[at + 1]) {
            (END, _) => return,
            (NOP, _) => at += 1,
            (MSS, 4) => {
                let announced = u16_at(segment, at + 2);
                if announced > most {
                    // The number may stand across two words of the sum: then its bytes change places.
                    let swap = |word: u16| if at.is_multiple_of(2) { word } else { word.swap_bytes() };
                    let delta = Delta::of(swap(announced).into(), swap(most).into());
                    let checksum = delta.apply(u16_at(segment, tcp::CHECKSUM));
                    set_u16(segment, at + 2, most);
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
    fn a_larger_size_becomes_the_largest_wherever_it_stands() {
        for options in [&[2, 4, 5, 0xb4][..], &[1, 2, 4, 5, 0xb4, 0, 0, 0], &[3, 3, 7, 2, 4, 5, 0xb4, 0]] {
            let mut segment = syn(options);
            clamp(&mut segment, 1360);
            assert!(checksum::verifies(0, &segment), "{options:?}");
            assert!(segment[20..].windows(4).any(|option| option == [2, 4, 5, 0x50]), "{segment:?}");
            let before = segment.clone();
            clamp(&mut segment, 1400);
            assert_eq!(segment, before, "never larger");
        }
    }

    #[test]
    fn broken_or_missing_options_change_nothing() {
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
