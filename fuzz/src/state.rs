//! The target of state files: the memory of a former process, with anything in it.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use vipgate_dataplane::time::Tick;

use crate::support::*;
use crate::{arrives, check_sent, policy};

/// The header and tables are cut from the file at multiples of this.
const PIECE: u64 = 2 << 20;
/// Of each, so much is ever written by so few sessions.
const USED: usize = 32 << 10;

const CALLS: [(&str, &str); 6] = [
    ("10.244.1.5:4000", "198.51.100.10:53"),
    ("10.244.1.5:4001", "198.51.100.10:53"),
    ("10.244.1.6:4000", "198.51.100.11:443"),
    ("10.244.1.21:4000", "192.0.2.200:53"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53"),
    ("[fd00:244:1::5]:4001", "[2001:db8:51::10]:443"),
];

/// What a process left that had these sessions, by piece.
struct Left {
    path: PathBuf,
    file: File,
    pieces: Vec<Vec<u8>>,
    length: u64,
}

thread_local! {
    static LEFT: RefCell<Option<Left>> = const { RefCell::new(None) };
}

fn setup(path: PathBuf) -> Setup {
    Setup { capacity: 64, frames: 64, state: Some(path), ..Setup::default() }
}

fn next_process(path: &std::path::Path, now: Tick) -> Gateway {
    let mut gateway = Gateway::starting_at(&setup(path.to_owned()), network(), &policy(), now);
    gateway.counts_vary();
    gateway.hostile = true;
    gateway
}

impl Left {
    fn new() -> Self {
        let path = std::path::Path::new("/dev/shm").join(format!("vipgate-fuzz-{}", std::process::id()));
        let mut gateway = next_process(&path, Tick(1_000));
        for (n, (pod, far)) in CALLS.iter().enumerate() {
            let protocol = if n % 2 == 0 { Protocol::Udp } else { Protocol::Tcp };
            for (_, frame) in arrives(&mut gateway, 0, true, &packet(protocol, at(pod), at(far))) {
                arrives(&mut gateway, 0, false, &answer_to(&frame, protocol));
            }
        }
        assert_eq!(gateway.sessions(), CALLS.len() as u64);
        drop(gateway);
        let file = path.with_extension("0");
        let file = OpenOptions::new().read(true).write(true).open(&file).expect("the gateway's file");
        let length = file.metadata().expect("its length").len();
        let pieces = (0..length / PIECE).map(|piece| {
            let mut bytes = vec![0; USED];
            file.read_exact_at(&mut bytes, piece * PIECE).expect("a piece");
            bytes
        });
        let pieces = pieces.collect();
        // The file stays open here, and goes with the process.
        std::fs::remove_file(path.with_extension("0")).expect("its name");
        Self { path, file, pieces, length }
    }

    /// Puts back what was there, changed by patches: a piece, two bytes of place, a length, and as many bytes.
    fn restore(&self, mut data: &[u8]) {
        self.file.set_len(self.length).expect("room");
        for (piece, bytes) in (0..).zip(&self.pieces) {
            self.file.write_all_at(bytes, piece * PIECE).expect("room");
        }
        while let [piece, high, low, length, more @ ..] = data {
            let (bytes, rest) = more.split_at(usize::from(*length).min(more.len()));
            data = rest;
            let place = u64::from(*high) << 8 | u64::from(*low);
            if *piece == 255 {
                // Cut short.
                self.file.set_len(place * 256).expect("less room");
                continue;
            }
            let at = u64::from(*piece) % self.pieces.len() as u64 * PIECE + place % (USED as u64 - 256);
            self.file.write_all_at(bytes, at).expect("room");
        }
    }
}

/// Patches to the file of a process that had some sessions; then the next one starts.
pub fn state(data: &[u8]) {
    LEFT.with_borrow_mut(|left| {
        let left = left.get_or_insert_with(Left::new);
        left.restore(data);
        let link = left.path.with_extension("0");
        let open = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&left.file));
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(open, &link).expect("a name for the file");
        let mut gateway = next_process(&left.path, Tick(2_000));
        std::fs::remove_file(&link).expect("its name");
        let (open, copies) = (gateway.sessions(), u64::from(gateway.workers[0].tables().sessions.copies()));
        assert!(open + copies <= 64, "{open} sessions and {copies} copies, and 64 fit");
        for (n, (pod, far)) in CALLS.iter().enumerate() {
            let protocol = if n % 2 == 0 { Protocol::Udp } else { Protocol::Tcp };
            for (interface, frame) in arrives(&mut gateway, 0, true, &packet(protocol, at(pod), at(far))) {
                if interface == OUTSIDE {
                    let sent = arrives(&mut gateway, 0, false, &answer_to(&frame, protocol));
                    check_sent(&sent);
                }
            }
        }
        gateway.pass(40_000);
        assert_eq!(gateway.sessions(), 0, "everything expires");
        gateway.check_frames();
    });
}

#[cfg(test)]
mod tests {
    //! Every input that is kept, and those that fuzzing begins with. `WRITE_CORPUS=1 cargo test -p vipgate-fuzz` writes the latter anew.

    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_next_process_works_whatever_is_in_the_file() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/state");
        // Header, tags, entries, deadlines; cut short.
        let made: [(&str, &[u8]); 6] = [
            ("untouched", &[]),
            ("header", &[0, 0, 12, 4, 1, 0, 0, 0]),
            ("tags", &[1, 0, 2, 4, 1, 1, 1, 1, 4, 0, 2, 4, 1, 1, 1, 1]),
            ("entries", &[2, 0, 8, 8, 255, 255, 255, 255, 255, 255, 255, 255, 5, 0, 32, 2, 9, 9]),
            ("deadlines", &[3, 0, 0, 4, 255, 255, 255, 255, 6, 0, 0, 4, 0, 0, 0, 1]),
            ("cut", &[255, 32, 0, 0]),
        ];
        for (name, bytes) in made {
            if std::env::var_os("WRITE_CORPUS").is_some() {
                fs::create_dir_all(&folder).unwrap();
                fs::write(folder.join(name), bytes).unwrap();
            }
            state(bytes);
        }
        for file in fs::read_dir(&folder).unwrap() {
            state(&fs::read(file.unwrap().path()).unwrap());
        }
    }
}
