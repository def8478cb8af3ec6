//! Fuzz target of session persistence: a corrupted state file of an earlier process.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use vipgate_dataplane::flow::time::Tick;
use vipgate_testkit::{Gateway, OUTSIDE, Protocol, Setup, at, network, packet, reply_to};

use crate::{check_no_leak, inject, policy};

/// Alignment of the header and tables in the file.
const SLAB_ALIGNMENT: u64 = 2 << 20;
/// Bytes of each slab that these few sessions write.
const USED: usize = 32 << 10;

/// Source and destination of each session.
const SESSIONS: [(&str, &str); 6] = [
    ("10.244.1.5:4000", "198.51.100.10:53"),
    ("10.244.1.5:4001", "198.51.100.10:53"),
    ("10.244.1.6:4000", "198.51.100.11:443"),
    ("10.244.1.21:4000", "192.0.2.200:53"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53"),
    ("[fd00:244:1::5]:4001", "[2001:db8:51::10]:443"),
];

/// The state file of a process that had these sessions: its original contents by slab.
struct StateFile {
    path: PathBuf,
    slabs: Vec<Vec<u8>>,
    length: u64,
}

thread_local! {
    static STATE_FILE: RefCell<Option<StateFile>> = const { RefCell::new(None) };
}

fn setup(path: PathBuf) -> Setup {
    Setup { capacity: 64, frames: 64, state: Some(path), ..Setup::default() }
}

fn next_process(path: &std::path::Path, now: Tick) -> Gateway {
    let mut gateway = Gateway::starting_at(&setup(path.to_owned()), network(), &policy(), now);
    gateway.skip_counter_check();
    gateway.hostile = true;
    gateway
}

impl StateFile {
    fn new() -> Self {
        let path = std::path::Path::new("/dev/shm").join(format!("vipgate-fuzz-{}", std::process::id()));
        let mut gateway = next_process(&path, Tick(1_000));
        for (n, (pod, remote)) in SESSIONS.iter().enumerate() {
            let protocol = if n % 2 == 0 { Protocol::Udp } else { Protocol::Tcp };
            for (_, frame) in inject(&mut gateway, 0, true, &packet(protocol, at(pod), at(remote))) {
                inject(&mut gateway, 0, false, &reply_to(&frame, protocol));
            }
        }
        assert_eq!(gateway.sessions(), SESSIONS.len() as u64);
        drop(gateway);
        let file = path.with_extension("0");
        let file = File::open(&file).expect("the gateway's state file");
        let length = file.metadata().expect("its length").len();
        let slabs = (0..length / SLAB_ALIGNMENT).map(|slab| {
            let mut bytes = vec![0; USED];
            file.read_exact_at(&mut bytes, slab * SLAB_ALIGNMENT).expect("a slab");
            bytes
        });
        let slabs = slabs.collect();
        std::fs::remove_file(path.with_extension("0")).expect("the file is removed");
        Self { path, slabs, length }
    }

    /// Writes the original contents and applies patches: slab, two bytes of offset, length, bytes. Slab 255 truncates the
    /// file.
    fn write(&self, mut data: &[u8]) {
        let path = self.path.with_extension("0");
        // What an input that has crashed has left.
        let _ = std::fs::remove_file(&path);
        let options = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = options.expect("a file of nobody else");
        file.set_len(self.length).expect("space");
        for (slab, bytes) in (0..).zip(&self.slabs) {
            file.write_all_at(bytes, slab * SLAB_ALIGNMENT).expect("space");
        }
        while let [slab, high, low, length, tail @ ..] = data {
            let (bytes, rest) = tail.split_at(usize::from(*length).min(tail.len()));
            data = rest;
            let offset = u64::from(*high) << 8 | u64::from(*low);
            if *slab == 255 {
                file.set_len(offset * 256).expect("truncation");
                continue;
            }
            let slab_start = u64::from(*slab) % self.slabs.len() as u64 * SLAB_ALIGNMENT;
            file.write_all_at(bytes, slab_start + offset % (USED as u64 - 256)).expect("space");
        }
    }
}

/// Starts a gateway with a patched state file.
pub fn state(data: &[u8]) {
    STATE_FILE.with_borrow_mut(|state_file| {
        let state_file = state_file.get_or_insert_with(StateFile::new);
        state_file.write(data);
        let mut gateway = next_process(&state_file.path, Tick(2_000));
        std::fs::remove_file(state_file.path.with_extension("0")).expect("the file is removed");
        let (open, standby) = (gateway.sessions(), u64::from(gateway.workers[0].tables().sessions.standby_count()));
        assert!(open + standby <= 64, "{open} sessions and {standby} standby sessions exceed the capacity of 64");
        for (n, (pod, remote)) in SESSIONS.iter().enumerate() {
            let protocol = if n % 2 == 0 { Protocol::Udp } else { Protocol::Tcp };
            for (interface, frame) in inject(&mut gateway, 0, true, &packet(protocol, at(pod), at(remote))) {
                if interface == OUTSIDE {
                    let sent = inject(&mut gateway, 0, false, &reply_to(&frame, protocol));
                    check_no_leak(&sent);
                }
            }
        }
        gateway.advance(40_000);
        assert_eq!(gateway.sessions(), 0, "all sessions expire");
        gateway.check_frames();
    });
}

#[cfg(test)]
mod tests {
    //! Runs the corpus. `WRITE_CORPUS=1 cargo test -p vipgate-fuzz` regenerates the seeds.

    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn a_gateway_works_with_any_state_file() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/state");
        let seeds: [(&str, &[u8]); 6] = [
            ("untouched", &[]),
            ("header", &[0, 0, 12, 4, 1, 0, 0, 0]),
            ("tags", &[1, 0, 2, 4, 1, 1, 1, 1, 4, 0, 2, 4, 1, 1, 1, 1]),
            ("entries", &[2, 0, 8, 8, 255, 255, 255, 255, 255, 255, 255, 255, 5, 0, 32, 2, 9, 9]),
            ("deadlines", &[3, 0, 0, 4, 255, 255, 255, 255, 6, 0, 0, 4, 0, 0, 0, 1]),
            ("cut", &[255, 32, 0, 0]),
        ];
        for (name, bytes) in seeds {
            if std::env::var_os("WRITE_CORPUS").is_some() {
                fs::create_dir_all(&directory).unwrap();
                fs::write(directory.join(name), bytes).unwrap();
            }
            state(bytes);
        }
        for file in fs::read_dir(&directory).unwrap() {
            state(&fs::read(file.unwrap().path()).unwrap());
        }
    }
}
