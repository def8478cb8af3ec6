//! The kinds of calls that a test makes fail: system calls, each with what it is called on, and with errors that the
//! kernel may return. Every call that the seccomp filters allow is here or in [`NEVER_FAILS`]; a test compares them.

use nix::libc::{self, c_long};

use super::descriptor::Descriptor;

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The name of the system call, and after a slash what it is called on.
    pub name: &'static str,
    /// Number of the system call.
    pub call: c_long,
    /// Which of these calls.
    pub target: Target,
    /// Errors that it may return.
    pub errors: &'static [i32],
}

/// Which calls of a system call are of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// All.
    Any,
    /// Those with this first argument: a command of bpf(2), a family of socket(2).
    Argument(i32),
    /// Those whose first argument is such a file descriptor.
    Descriptor(Descriptor),
}

const fn any(name: &'static str, call: c_long, errors: &'static [i32]) -> Kind {
    Kind { name, call, target: Target::Any, errors }
}

const fn bpf(name: &'static str, command: i32, errors: &'static [i32]) -> Kind {
    Kind { name, call: libc::SYS_bpf, target: Target::Argument(command), errors }
}

const fn socket(name: &'static str, family: i32, errors: &'static [i32]) -> Kind {
    Kind { name, call: libc::SYS_socket, target: Target::Argument(family), errors }
}

const fn on(name: &'static str, call: c_long, descriptor: Descriptor, errors: &'static [i32]) -> Kind {
    Kind { name, call, target: Target::Descriptor(descriptor), errors }
}

/// Errors of calls that open a descriptor, of calls on paths, and of calls that write.
const OPEN: &[i32] = &[libc::EMFILE, libc::ENFILE, libc::ENOMEM];
const PATH: &[i32] = &[libc::EIO, libc::ENOMEM];
const WRITE: &[i32] = &[libc::ENOSPC, libc::EDQUOT, libc::EIO];
const MEMORY: &[i32] = &[libc::ENOMEM];
const BUFFERS: &[i32] = &[libc::ENOBUFS, libc::ENOMEM];
const CONNECTION: &[i32] = &[libc::ECONNRESET, libc::ENOBUFS];
/// Only a signal interrupts them; programs poll in a loop.
const INTERRUPTED: &[i32] = &[libc::EINTR];

/// All kinds. Of several kinds of one call, the first one whose target matches counts.
pub static KINDS: &[Kind] = &[
    // BPF: the commands of linux/bpf.h.
    bpf("bpf/map_create", 0, MEMORY),
    bpf("bpf/map_lookup", 1, MEMORY),
    bpf("bpf/map_update", 2, &[libc::ENOMEM, libc::E2BIG, libc::ENOSPC, libc::EBUSY]),
    bpf("bpf/map_delete", 3, &[libc::ENOMEM, libc::EBUSY]),
    bpf("bpf/prog_load", 5, &[libc::ENOMEM, libc::EMFILE]),
    bpf("bpf/prog_test_run", 10, MEMORY),
    bpf("bpf/prog_get_fd_by_id", 13, OPEN),
    bpf("bpf/obj_get_info_by_fd", 15, MEMORY),
    bpf("bpf/btf_load", 18, MEMORY),
    bpf("bpf/link_create", 28, &[libc::ENOMEM, libc::EBUSY]),
    // Memory, threads and processes.
    any("mmap", libc::SYS_mmap, MEMORY),
    any("mprotect", libc::SYS_mprotect, MEMORY),
    any("mremap", libc::SYS_mremap, MEMORY),
    any("madvise", libc::SYS_madvise, &[libc::ENOMEM, libc::EAGAIN]),
    any("mlock", libc::SYS_mlock, &[libc::ENOMEM, libc::EPERM]),
    any("mlock2", libc::SYS_mlock2, &[libc::ENOMEM, libc::EPERM]),
    any("clone", libc::SYS_clone, &[libc::EAGAIN, libc::ENOMEM]),
    any("clone3", libc::SYS_clone3, &[libc::EAGAIN, libc::ENOMEM]),
    any("execve", libc::SYS_execve, MEMORY),
    any("pidfd_open", libc::SYS_pidfd_open, OPEN),
    any("setpgid", libc::SYS_setpgid, &[libc::EPERM]),
    any("capset", libc::SYS_capset, &[libc::EPERM]),
    any("prctl", libc::SYS_prctl, &[libc::EPERM]),
    any("seccomp", libc::SYS_seccomp, MEMORY),
    any("sched_getaffinity", libc::SYS_sched_getaffinity, MEMORY),
    any("sched_setaffinity", libc::SYS_sched_setaffinity, &[libc::EINVAL, libc::ENOMEM]),
    // Files.
    any("access", libc::SYS_access, PATH),
    any("chmod", libc::SYS_chmod, PATH),
    any("copy_file_range", libc::SYS_copy_file_range, WRITE),
    any("dup", libc::SYS_dup, &[libc::EMFILE]),
    any("faccessat", libc::SYS_faccessat, PATH),
    any("faccessat2", libc::SYS_faccessat2, PATH),
    any("fallocate", libc::SYS_fallocate, WRITE),
    any("fchmod", libc::SYS_fchmod, PATH),
    any("fchmodat", libc::SYS_fchmodat, PATH),
    any("fcntl", libc::SYS_fcntl, &[libc::EMFILE, libc::ENOLCK]),
    any("fdatasync", libc::SYS_fdatasync, WRITE),
    any("flock", libc::SYS_flock, &[libc::ENOLCK, libc::ENOMEM]),
    any("fstat", libc::SYS_fstat, PATH),
    any("fstatfs", libc::SYS_fstatfs, PATH),
    any("fsync", libc::SYS_fsync, WRITE),
    any("ftruncate", libc::SYS_ftruncate, &[libc::EIO]),
    any("getcwd", libc::SYS_getcwd, MEMORY),
    any("getdents64", libc::SYS_getdents64, PATH),
    any("inotify_add_watch", libc::SYS_inotify_add_watch, &[libc::ENOSPC, libc::ENOMEM]),
    any("inotify_init", libc::SYS_inotify_init, OPEN),
    any("inotify_init1", libc::SYS_inotify_init1, OPEN),
    any("inotify_rm_watch", libc::SYS_inotify_rm_watch, &[libc::EINVAL]),
    any("ioctl", libc::SYS_ioctl, PATH),
    any("lseek", libc::SYS_lseek, &[libc::EIO]),
    any("lstat", libc::SYS_lstat, PATH),
    any("mkdir", libc::SYS_mkdir, WRITE),
    any("mkdirat", libc::SYS_mkdirat, WRITE),
    any("newfstatat", libc::SYS_newfstatat, PATH),
    any("open", libc::SYS_open, &[libc::EMFILE, libc::ENFILE, libc::EIO]),
    any("openat", libc::SYS_openat, &[libc::EMFILE, libc::ENFILE, libc::EIO]),
    any("pread64", libc::SYS_pread64, &[libc::EIO]),
    any("preadv", libc::SYS_preadv, &[libc::EIO]),
    any("pwrite64", libc::SYS_pwrite64, WRITE),
    any("pwritev", libc::SYS_pwritev, WRITE),
    on("read/file", libc::SYS_read, Descriptor::File, PATH),
    on("read/tcp", libc::SYS_read, Descriptor::Ip, CONNECTION),
    on("read/unix", libc::SYS_read, Descriptor::Unix, CONNECTION),
    any("readlink", libc::SYS_readlink, PATH),
    any("readlinkat", libc::SYS_readlinkat, PATH),
    on("readv/file", libc::SYS_readv, Descriptor::File, PATH),
    on("readv/tcp", libc::SYS_readv, Descriptor::Ip, CONNECTION),
    any("rename", libc::SYS_rename, WRITE),
    any("renameat", libc::SYS_renameat, WRITE),
    any("renameat2", libc::SYS_renameat2, WRITE),
    any("rmdir", libc::SYS_rmdir, &[libc::EIO]),
    any("stat", libc::SYS_stat, PATH),
    any("statfs", libc::SYS_statfs, PATH),
    any("statx", libc::SYS_statx, PATH),
    any("unlink", libc::SYS_unlink, &[libc::EIO]),
    any("unlinkat", libc::SYS_unlinkat, &[libc::EIO]),
    any("utimensat", libc::SYS_utimensat, PATH),
    // Not those of event loops, which wake each other by an eventfd or a pipe: the kernel refuses none.
    on("write/file", libc::SYS_write, Descriptor::File, WRITE),
    on("write/tcp", libc::SYS_write, Descriptor::Ip, CONNECTION),
    on("writev/file", libc::SYS_writev, Descriptor::File, WRITE),
    on("writev/tcp", libc::SYS_writev, Descriptor::Ip, CONNECTION),
    on("writev/unix", libc::SYS_writev, Descriptor::Unix, CONNECTION),
    // Sockets.
    any("accept", libc::SYS_accept, &[libc::EMFILE, libc::ENFILE, libc::ECONNABORTED]),
    any("accept4", libc::SYS_accept4, &[libc::EMFILE, libc::ENFILE, libc::ECONNABORTED]),
    on("bind/ip", libc::SYS_bind, Descriptor::Ip, &[libc::EADDRINUSE, libc::ENOMEM]),
    on("bind/netlink", libc::SYS_bind, Descriptor::Netlink, MEMORY),
    on("bind/packet", libc::SYS_bind, Descriptor::Packet, MEMORY),
    on("bind/unix", libc::SYS_bind, Descriptor::Unix, &[libc::EADDRINUSE, libc::ENOMEM]),
    on("bind/xdp", libc::SYS_bind, Descriptor::Xdp, &[libc::EBUSY, libc::ENOMEM]),
    on("connect/ip", libc::SYS_connect, Descriptor::Ip, &[libc::ECONNREFUSED, libc::ENETUNREACH, libc::EADDRNOTAVAIL]),
    on("connect/unix", libc::SYS_connect, Descriptor::Unix, &[libc::EAGAIN]),
    any("getpeername", libc::SYS_getpeername, BUFFERS),
    any("getsockname", libc::SYS_getsockname, BUFFERS),
    any("getsockopt", libc::SYS_getsockopt, BUFFERS),
    any("listen", libc::SYS_listen, &[libc::EADDRINUSE]),
    on("recvfrom/ip", libc::SYS_recvfrom, Descriptor::Ip, CONNECTION),
    on("recvfrom/netlink", libc::SYS_recvfrom, Descriptor::Netlink, BUFFERS),
    on("recvfrom/packet", libc::SYS_recvfrom, Descriptor::Packet, &[libc::ENETDOWN, libc::ENOMEM]),
    on("recvfrom/unix", libc::SYS_recvfrom, Descriptor::Unix, CONNECTION),
    on("recvfrom/xdp", libc::SYS_recvfrom, Descriptor::Xdp, &[libc::EAGAIN, libc::ENOBUFS]),
    on("recvmsg/ip", libc::SYS_recvmsg, Descriptor::Ip, CONNECTION),
    on("recvmsg/netlink", libc::SYS_recvmsg, Descriptor::Netlink, BUFFERS),
    on("recvmsg/unix", libc::SYS_recvmsg, Descriptor::Unix, CONNECTION),
    any("recvmmsg", libc::SYS_recvmmsg, BUFFERS),
    on("sendmsg/ip", libc::SYS_sendmsg, Descriptor::Ip, CONNECTION),
    on("sendmsg/netlink", libc::SYS_sendmsg, Descriptor::Netlink, BUFFERS),
    on("sendmsg/unix", libc::SYS_sendmsg, Descriptor::Unix, CONNECTION),
    any("sendmmsg", libc::SYS_sendmmsg, BUFFERS),
    on("sendto/ip", libc::SYS_sendto, Descriptor::Ip, &[libc::ECONNRESET, libc::EPIPE, libc::ENOBUFS]),
    on("sendto/netlink", libc::SYS_sendto, Descriptor::Netlink, BUFFERS),
    on("sendto/packet", libc::SYS_sendto, Descriptor::Packet, &[libc::ENETDOWN, libc::ENOBUFS]),
    on("sendto/unix", libc::SYS_sendto, Descriptor::Unix, CONNECTION),
    on("sendto/xdp", libc::SYS_sendto, Descriptor::Xdp, &[libc::EAGAIN, libc::EBUSY, libc::ENOBUFS, libc::ENETDOWN]),
    any("setsockopt", libc::SYS_setsockopt, BUFFERS),
    any("shutdown", libc::SYS_shutdown, &[libc::ENOTCONN]),
    socket("socket/unix", libc::AF_UNIX, OPEN),
    socket("socket/ipv4", libc::AF_INET, OPEN),
    socket("socket/ipv6", libc::AF_INET6, OPEN),
    socket("socket/netlink", libc::AF_NETLINK, OPEN),
    socket("socket/packet", libc::AF_PACKET, OPEN),
    socket("socket/xdp", libc::AF_XDP, OPEN),
    any("socketpair", libc::SYS_socketpair, OPEN),
    // Event loops.
    any("epoll_create", libc::SYS_epoll_create, OPEN),
    any("epoll_create1", libc::SYS_epoll_create1, OPEN),
    any("epoll_ctl", libc::SYS_epoll_ctl, &[libc::ENOMEM, libc::ENOSPC]),
    any("epoll_pwait", libc::SYS_epoll_pwait, INTERRUPTED),
    any("epoll_pwait2", libc::SYS_epoll_pwait2, INTERRUPTED),
    any("epoll_wait", libc::SYS_epoll_wait, INTERRUPTED),
    any("eventfd", libc::SYS_eventfd, OPEN),
    any("eventfd2", libc::SYS_eventfd2, OPEN),
    any("pipe", libc::SYS_pipe, OPEN),
    any("pipe2", libc::SYS_pipe2, OPEN),
    any("poll", libc::SYS_poll, &[libc::EINTR, libc::ENOMEM]),
    any("ppoll", libc::SYS_ppoll, &[libc::EINTR, libc::ENOMEM]),
    any("pselect6", libc::SYS_pselect6, &[libc::EINTR, libc::ENOMEM]),
    any("select", libc::SYS_select, &[libc::EINTR, libc::ENOMEM]),
    any("signalfd4", libc::SYS_signalfd4, OPEN),
    any("timerfd_create", libc::SYS_timerfd_create, OPEN),
];

/// Allowed calls that aren't made to fail, by reason.
pub static NEVER_FAILS: &[(&str, &[c_long])] = &[
    (
        "they read or set what is the process's own, and fail for wrong arguments only",
        &[
            libc::SYS_arch_prctl,
            libc::SYS_capget,
            libc::SYS_clock_getres,
            libc::SYS_clock_gettime,
            libc::SYS_dup2,
            libc::SYS_dup3,
            libc::SYS_getcpu,
            libc::SYS_getegid,
            libc::SYS_geteuid,
            libc::SYS_getgid,
            libc::SYS_getpgrp,
            libc::SYS_getpid,
            libc::SYS_getppid,
            libc::SYS_getrlimit,
            libc::SYS_getrusage,
            libc::SYS_gettid,
            libc::SYS_gettimeofday,
            libc::SYS_getuid,
            libc::SYS_membarrier,
            libc::SYS_munlock,
            libc::SYS_prlimit64,
            libc::SYS_rseq,
            libc::SYS_rt_sigaction,
            libc::SYS_rt_sigprocmask,
            libc::SYS_sched_yield,
            libc::SYS_set_robust_list,
            libc::SYS_set_tid_address,
            libc::SYS_setrlimit,
            libc::SYS_sigaltstack,
            libc::SYS_sysinfo,
            libc::SYS_time,
            libc::SYS_timerfd_settime,
            libc::SYS_times,
            libc::SYS_umask,
            libc::SYS_uname,
        ],
    ),
    ("they don't return", &[libc::SYS_exit, libc::SYS_exit_group, libc::SYS_rt_sigreturn]),
    ("what they release is gone, whatever they return", &[libc::SYS_close, libc::SYS_munmap]),
    ("a process signals itself and its child", &[libc::SYS_kill, libc::SYS_pidfd_send_signal, libc::SYS_tgkill]),
    (
        "they wait, for a time or for a child, until a signal",
        &[
            libc::SYS_clock_nanosleep,
            libc::SYS_nanosleep,
            libc::SYS_restart_syscall,
            libc::SYS_rt_sigtimedwait,
            libc::SYS_wait4,
            libc::SYS_waitid,
        ],
    ),
    ("locks take an error for a lock that is free", &[libc::SYS_futex]),
    ("once seeded, the kernel has random numbers for everybody", &[libc::SYS_getrandom]),
    ("it returns no error, and the allocator then uses mmap", &[libc::SYS_brk]),
];

/// The kind with this name.
pub fn find(name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_allowed_call_may_fail_or_has_a_reason_why_not() {
        let allowed = vipgate::privileges::allowed_calls().unwrap();
        let failing: BTreeSet<i64> = KINDS.iter().map(|kind| kind.call).collect();
        let never: BTreeSet<i64> = NEVER_FAILS.iter().flat_map(|(_, calls)| *calls).copied().collect();
        let both: Vec<_> = failing.intersection(&never).collect();
        assert!(both.is_empty(), "they can't be in both lists: {both:?}");
        let listed: BTreeSet<i64> = failing.union(&never).copied().collect();
        let missing: Vec<_> = allowed.calls.difference(&listed).collect();
        assert!(missing.is_empty(), "allowed, so they belong in one of the lists, with their errors: {missing:?}");
        let stale: Vec<_> = listed.difference(&allowed.calls).collect();
        assert!(stale.is_empty(), "no filter allows them any more: {stale:?}");
    }

    #[test]
    fn every_allowed_socket_family_may_fail() {
        let allowed = vipgate::privileges::allowed_calls().unwrap();
        for family in allowed.families {
            let is_kind = |kind: &Kind| kind.call == libc::SYS_socket && kind.target == Target::Argument(family);
            assert!(KINDS.iter().any(is_kind), "family {family}");
        }
    }

    #[test]
    fn kinds_have_names_of_their_own_and_errors() {
        let names: BTreeSet<&str> = KINDS.iter().map(|kind| kind.name).collect();
        assert_eq!(names.len(), KINDS.len());
        assert!(KINDS.iter().all(|kind| !kind.errors.is_empty() && find(kind.name) == Some(kind)));
    }
}
