//! Filters of system calls (seccomp(2)): lists of what threads of a kind use. A filter holds for whatever the thread starts, too, and a second one can only
//! take away more.
//!
//! Lists are generous within what such programs do with files, memory, threads and sockets, and have nothing beyond: no mounts, namespaces, modules, keys, tracing, other
//! processes' memory, clocks, `io_uring`, no memory that is both written and executed.

use std::collections::BTreeMap;
use std::io;

use libc::{SYS_clone, SYS_clone3, SYS_mmap, SYS_mprotect, SYS_socket};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use vipgate_xdp::seccomp::{self, Instruction};

use crate::config::Seccomp;

/// Threads that use the same calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Calls {
    /// A gateway's: workers take away more.
    Gateway,
    /// A worker's.
    Worker,
    /// A policy server's.
    Server,
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Memory, time, locks, signals, ends: every thread's.
const ANY: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_write,
    libc::SYS_writev,
    // Of sockets, what an AF_XDP ring takes.
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
];

/// What threads use that follow files, talk to others, and answer people.
const CONTROL: &[i64] = &[
    // Files.
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    // Sockets.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_listen,
    libc::SYS_recvmmsg,
    libc::SYS_sendmmsg,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_pselect6,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    // Itself.
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getppid,
    libc::SYS_getrusage,
    libc::SYS_getuid,
    libc::SYS_kill,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_setaffinity,
    libc::SYS_seccomp,
    libc::SYS_set_tid_address,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_uname,
];

/// What a gateway uses besides: programs and maps of the kernel, and the process that withdraws its routes.
const GATEWAY: &[i64] = &[
    libc::SYS_bpf,
    libc::SYS_execve,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_setpgid,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// What older ABIs have under other names.
#[cfg(target_arch = "x86_64")]
const OLD: &[i64] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_chmod,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_getpgrp,
    libc::SYS_getrlimit,
    libc::SYS_inotify_init,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_setrlimit,
    libc::SYS_stat,
    libc::SYS_time,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[i64] = &[];
/// The same of a worker's.
#[cfg(target_arch = "x86_64")]
const OLD_ANY: &[i64] = &[libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const OLD_ANY: &[i64] = &[];

/// Kinds of sockets: names, the network, interfaces, packets.
const FAMILIES: [i32; 6] =
    [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_XDP];
/// A policy server's; resolving names asks the kernel for its addresses.
const SERVER_FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Namespaces of its own: time, mounts, control groups, host name, IPC, users, processes, network.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | 0x80;

/// Installs the filter of such a thread.
pub(super) fn install(calls: Calls, seccomp: Seccomp) -> io::Result<()> {
    // The kernel's pointer hides what is asked for; without it, libraries ask by `clone`, whose flags can be seen.
    let hidden = BTreeMap::from([(SYS_clone3, Vec::new())]);
    if calls != Calls::Worker && seccomp == Seccomp::Enforce {
        put(program(hidden, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?, false)?;
    }
    put(list(calls, seccomp)?, true)
}

/// The filter of such a thread.
fn list(calls: Calls, seccomp: Seccomp) -> io::Result<BpfProgram> {
    let otherwise = match seccomp {
        Seccomp::Enforce => SeccompAction::Errno(libc::EPERM as u32),
        Seccomp::Log | Seccomp::Off => SeccompAction::Log,
    };
    program(rules(calls)?, otherwise, SeccompAction::Allow)
}

fn rules(calls: Calls) -> io::Result<Rules> {
    let plain: &[&[i64]] = match calls {
        Calls::Worker => &[ANY, OLD_ANY],
        Calls::Server => &[ANY, OLD_ANY, CONTROL, OLD],
        Calls::Gateway => &[ANY, OLD_ANY, CONTROL, OLD, GATEWAY],
    };
    let mut rules: Rules = plain.iter().copied().flatten().map(|call| (*call, Vec::new())).collect();
    // Memory is written or executed, never both; what was written is never executed later.
    rules.insert(SYS_mmap, vec![without_bits(2, libc::PROT_EXEC)?, without_bits(2, libc::PROT_WRITE)?]);
    rules.insert(SYS_mprotect, vec![without_bits(2, libc::PROT_EXEC)?]);
    if calls != Calls::Worker {
        // Threads, and a gateway's process.
        rules.insert(SYS_clone, vec![without_bits(0, NAMESPACES)?]);
        rules.insert(SYS_clone3, Vec::new());
        let families = if calls == Calls::Gateway { &FAMILIES[..] } else { &SERVER_FAMILIES[..] };
        rules.insert(SYS_socket, families.iter().map(|family| equal(0, *family)).collect::<io::Result<_>>()?);
    }
    Ok(rules)
}

fn without_bits(argument: u8, bits: i32) -> io::Result<SeccompRule> {
    rule(argument, SeccompCmpOp::MaskedEq(u64::from(bits.cast_unsigned())), 0)
}

fn equal(argument: u8, value: i32) -> io::Result<SeccompRule> {
    rule(argument, SeccompCmpOp::Eq, u64::from(value.cast_unsigned()))
}

fn rule(argument: u8, operation: SeccompCmpOp, value: u64) -> io::Result<SeccompRule> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operation, value);
    condition.and_then(|condition| SeccompRule::new(vec![condition])).map_err(io::Error::other)
}

fn program(rules: Rules, otherwise: SeccompAction, found: SeccompAction) -> io::Result<BpfProgram> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, otherwise, found, architecture).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

fn put(program: BpfProgram, logged: bool) -> io::Result<()> {
    let instruction = |it: seccompiler::sock_filter| Instruction { code: it.code, jt: it.jt, jf: it.jf, k: it.k };
    seccomp::install(&program.into_iter().map(instruction).collect::<Vec<_>>(), logged)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::thread::set_no_new_privs;

    use super::*;

    /// What a thread sees that has the filter.
    fn within<T: Send + 'static>(calls: Calls, seccomp: Seccomp, look: impl FnOnce() -> T + Send + 'static) -> T {
        let filtered = move || {
            set_no_new_privs(true).unwrap();
            install(calls, seccomp).unwrap();
            look()
        };
        thread::spawn(filtered).join().unwrap()
    }

    fn error<T>(result: io::Result<T>) -> Option<io::ErrorKind> {
        result.err().map(|error| error.kind())
    }

    #[test]
    fn what_a_gateway_does_goes_on_and_what_it_does_not_do_fails() {
        within(Calls::Gateway, Seccomp::Enforce, || {
            let file = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(file.contains("Seccomp:\t2"), "{file}");
            assert!(thread::spawn(|| 7).join().unwrap() == 7, "threads, without clone3");
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let there = listener.local_addr().unwrap();
            assert!(std::net::TcpStream::connect(there).is_ok());
            assert!(std::process::Command::new("/bin/true").status().unwrap().success(), "its helper process");
            let link = std::fs::hard_link("/proc/self/status", "/nowhere/link");
            assert_eq!(error(link), Some(io::ErrorKind::PermissionDenied));
        });
    }

    #[test]
    fn a_server_starts_no_process() {
        within(Calls::Server, Seccomp::Enforce, || {
            assert_eq!(error(std::process::Command::new("/bin/true").status()), Some(io::ErrorKind::PermissionDenied));
            assert!(
                std::net::TcpListener::bind("[::1]:0").is_ok() || std::net::TcpListener::bind("127.0.0.1:0").is_ok()
            );
        });
    }

    #[test]
    fn a_worker_opens_nothing() {
        within(Calls::Worker, Seccomp::Enforce, || {
            assert_eq!(error(std::fs::File::open("/etc/hostname")), Some(io::ErrorKind::PermissionDenied));
            assert_eq!(error(std::net::UdpSocket::bind("127.0.0.1:0")), Some(io::ErrorKind::PermissionDenied));
            let grown: Vec<u8> = vec![1; 64 << 20];
            assert_eq!(grown.iter().step_by(4096).map(|byte| usize::from(*byte)).sum::<usize>(), (64 << 20) / 4096);
        });
    }

    #[test]
    fn what_is_only_logged_goes_on() {
        within(Calls::Worker, Seccomp::Log, || assert!(std::fs::File::open("/proc/self/status").is_ok()));
    }
}
