//! What a file descriptor of another process is.

use std::collections::HashMap;
use std::fs;

use nix::libc;
use nix::unistd::Pid;
use rustix::net::sockopt::socket_domain;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// The kind of a file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptor {
    /// A file or directory.
    File,
    /// A TCP or UDP socket.
    Ip,
    /// A netlink socket.
    Netlink,
    /// A packet socket.
    Packet,
    /// A Unix socket.
    Unix,
    /// An AF_XDP socket.
    Xdp,
    /// An eventfd, a pipe, or none.
    Other,
}

/// The sockets of traced processes that are known.
#[derive(Debug, Default)]
pub(super) struct Sockets(HashMap<String, Descriptor>);

impl Sockets {
    /// The kind of a thread's file descriptor.
    pub(super) fn classify(&mut self, thread: Pid, descriptor: u64) -> Descriptor {
        let Some(link) = link(thread, descriptor) else { return Descriptor::Other };
        if !link.starts_with("socket:") {
            return if link.starts_with('/') { Descriptor::File } else { Descriptor::Other };
        }
        *self.0.entry(link).or_insert_with(|| of_family(family(thread, descriptor)))
    }
}

/// What /proc shows of a thread's file descriptor: the path of a file, the type and inode of others.
pub(super) fn link(thread: Pid, descriptor: u64) -> Option<String> {
    Some(fs::read_link(format!("/proc/{thread}/fd/{descriptor}")).ok()?.to_string_lossy().into_owned())
}

fn of_family(family: Option<i32>) -> Descriptor {
    match family {
        Some(libc::AF_INET | libc::AF_INET6) => Descriptor::Ip,
        Some(libc::AF_NETLINK) => Descriptor::Netlink,
        Some(libc::AF_PACKET) => Descriptor::Packet,
        Some(libc::AF_UNIX) => Descriptor::Unix,
        Some(libc::AF_XDP) => Descriptor::Xdp,
        _ => Descriptor::Other,
    }
}

/// The family of a thread's socket.
fn family(thread: Pid, descriptor: u64) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()?;
    let process = pidfd_open(rustix::process::Pid::from_raw(process)?, PidfdFlags::empty()).ok()?;
    let socket = pidfd_getfd(process, i32::try_from(descriptor).ok()?, PidfdGetfdFlags::empty()).ok()?;
    Some(i32::from(socket_domain(socket).ok()?.as_raw()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io;
    use std::net::UdpSocket;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn files_sockets_and_others_are_distinguished() {
        let (reader, _writer) = io::pipe().unwrap();
        let file = File::open("/proc/self/status").unwrap();
        let (socket, unix) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UnixDatagram::unbound().unwrap());
        let mut sockets = Sockets::default();
        for (descriptor, expected) in [
            (file.as_fd(), Descriptor::File),
            (socket.as_fd(), Descriptor::Ip),
            (unix.as_fd(), Descriptor::Unix),
            (reader.as_fd(), Descriptor::Other),
        ] {
            let number = u64::try_from(descriptor.as_raw_fd()).unwrap();
            assert_eq!(sockets.classify(nix::unistd::gettid(), number), expected);
        }
        assert_eq!(sockets.classify(nix::unistd::gettid(), 1 << 20), Descriptor::Other);
    }
}
