//! System call filters (seccomp(2)): one allow list per kind of thread. A filter is inherited by threads and processes
//! started later, and further filters can only restrict it.
//!
//! The lists are generous for files, memory, threads and sockets, and contain nothing else: no mounts, namespaces,
//! modules, keys, tracing, other processes' memory, setting clocks, `io_uring`, no memory that is both writable and
//! executable.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use libc::{SYS_clone, SYS_clone3, SYS_mmap, SYS_mprotect, SYS_socket};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use vipgate_xdp::seccomp::{self, Instruction};

use super::AllowedCalls;
use crate::config::Seccomp;

/// A seccomp profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Profile {
    /// Of a gateway; workers add their own.
    Gateway,
    Worker,
    /// Of a policy server.
    Server,
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// All profiles: memory, time, locks, signals, exit.
const COMMON: &[i64] = &[
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
    // Sockets: what AF_XDP rings need.
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
];

/// Control planes: files, sockets, timers, credentials.
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
    // Event loops and timers.
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
    // The process itself.
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

/// Gateway only: BPF, and the process that withdraws its routes.
const GATEWAY: &[i64] = &[
    libc::SYS_bpf,
    libc::SYS_execve,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_setpgid,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// Control planes: legacy calls of x86_64.
#[cfg(target_arch = "x86_64")]
const LEGACY_CONTROL: &[i64] = &[
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
const LEGACY_CONTROL: &[i64] = &[];
/// All profiles: legacy calls of x86_64.
#[cfg(target_arch = "x86_64")]
const LEGACY_COMMON: &[i64] = &[libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const LEGACY_COMMON: &[i64] = &[];

/// Socket families of a gateway.
const FAMILIES: [i32; 6] =
    [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_XDP];
/// Socket families of a policy server; netlink, since name resolution lists local addresses.
const SERVER_FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// The clone(2) flags that create namespaces; the last one is `CLONE_NEWTIME`.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | 0x80;

/// The calls that any profile allows.
pub(super) fn allowed() -> io::Result<AllowedCalls> {
    let mut calls = BTreeSet::new();
    for profile in [Profile::Gateway, Profile::Worker, Profile::Server] {
        calls.extend(rules(profile)?.into_keys());
    }
    Ok(AllowedCalls { calls, families: FAMILIES.into_iter().chain(SERVER_FAMILIES).collect() })
}

/// Installs the filter of a profile on the calling thread.
pub(super) fn install(calls: Profile, seccomp: Seccomp) -> io::Result<()> {
    // clone3 passes its flags by pointer, which a filter can't read; with ENOSYS libraries fall back to clone.
    let clone3 = BTreeMap::from([(SYS_clone3, Vec::new())]);
    if calls != Profile::Worker && seccomp == Seccomp::Enforce {
        attach(program(clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?, false)?;
    }
    attach(build(calls, seccomp)?, true)
}

/// Builds the filter of a profile.
fn build(calls: Profile, seccomp: Seccomp) -> io::Result<BpfProgram> {
    let default = match seccomp {
        Seccomp::Enforce => SeccompAction::Errno(libc::EPERM as u32),
        Seccomp::Log | Seccomp::Off => SeccompAction::Log,
    };
    program(rules(calls)?, default, SeccompAction::Allow)
}

fn rules(calls: Profile) -> io::Result<Rules> {
    let lists: &[&[i64]] = match calls {
        Profile::Worker => &[COMMON, LEGACY_COMMON],
        Profile::Server => &[COMMON, LEGACY_COMMON, CONTROL, LEGACY_CONTROL],
        Profile::Gateway => &[COMMON, LEGACY_COMMON, CONTROL, LEGACY_CONTROL, GATEWAY],
    };
    let mut rules: Rules = lists.iter().copied().flatten().map(|call| (*call, Vec::new())).collect();
    // Memory is never both writable and executable, and never becomes executable.
    rules.insert(SYS_mmap, vec![without_bits(2, libc::PROT_EXEC)?, without_bits(2, libc::PROT_WRITE)?]);
    rules.insert(SYS_mprotect, vec![without_bits(2, libc::PROT_EXEC)?]);
    if calls != Profile::Worker {
        // Threads, and a gateway's child process.
        rules.insert(SYS_clone, vec![without_bits(0, NAMESPACES)?]);
        rules.insert(SYS_clone3, Vec::new());
        let families = if calls == Profile::Gateway { &FAMILIES[..] } else { &SERVER_FAMILIES[..] };
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

fn program(rules: Rules, default: SeccompAction, on_match: SeccompAction) -> io::Result<BpfProgram> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, default, on_match, architecture).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

fn attach(program: BpfProgram, logged: bool) -> io::Result<()> {
    let instruction = |it: seccompiler::sock_filter| Instruction { code: it.code, jt: it.jt, jf: it.jf, k: it.k };
    seccomp::install(&program.into_iter().map(instruction).collect::<Vec<_>>(), logged)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::thread::set_no_new_privs;

    use super::*;

    /// Runs a closure on a thread with the filter.
    fn with_filter<T: Send + 'static>(calls: Profile, seccomp: Seccomp, run: impl FnOnce() -> T + Send + 'static) -> T {
        let filtered = move || {
            set_no_new_privs(true).unwrap();
            install(calls, seccomp).unwrap();
            run()
        };
        thread::spawn(filtered).join().unwrap()
    }

    fn error<T>(result: io::Result<T>) -> Option<io::ErrorKind> {
        result.err().map(|error| error.kind())
    }

    #[test]
    fn a_gateway_can_use_files_threads_sockets_and_processes_only() {
        with_filter(Profile::Gateway, Seccomp::Enforce, || {
            let file = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(file.contains("Seccomp:\t2"), "{file}");
            assert!(thread::spawn(|| 7).join().unwrap() == 7, "threads, without clone3");
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            assert!(std::net::TcpStream::connect(address).is_ok());
            assert!(std::process::Command::new("/bin/true").status().unwrap().success(), "its child process");
            let link = std::fs::hard_link("/proc/self/status", "/nowhere/link");
            assert_eq!(error(link), Some(io::ErrorKind::PermissionDenied));
        });
    }

    #[test]
    fn a_policy_server_cannot_execute_programs() {
        with_filter(Profile::Server, Seccomp::Enforce, || {
            assert_eq!(error(std::process::Command::new("/bin/true").status()), Some(io::ErrorKind::PermissionDenied));
            assert!(
                std::net::TcpListener::bind("[::1]:0").is_ok() || std::net::TcpListener::bind("127.0.0.1:0").is_ok()
            );
        });
    }

    #[test]
    fn a_worker_cannot_open_files_or_sockets() {
        with_filter(Profile::Worker, Seccomp::Enforce, || {
            assert_eq!(error(std::fs::File::open("/etc/hostname")), Some(io::ErrorKind::PermissionDenied));
            assert_eq!(error(std::net::UdpSocket::bind("127.0.0.1:0")), Some(io::ErrorKind::PermissionDenied));
            let allocated: Vec<u8> = vec![1; 64 << 20];
            assert_eq!(allocated.iter().step_by(4096).map(|byte| usize::from(*byte)).sum::<usize>(), (64 << 20) / 4096);
        });
    }

    #[test]
    fn log_mode_denies_nothing() {
        with_filter(Profile::Worker, Seccomp::Log, || assert!(std::fs::File::open("/proc/self/status").is_ok()));
    }
}
