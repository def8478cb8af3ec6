//! What a process inherits, and from which file.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use tempfile::TempDir;

use super::*;
use crate::membership::Member;

const ORIGIN: Origin = Origin { boot: [1; 16], device: 2, inode: 3 };

/// A view that names this process of gateway `a`, with this certificate and tunnel key.
fn view(number: u64, incarnation: u64, of: &Inheritance) -> Arc<MembershipView> {
    let member = Member {
        serving: true,
        incarnation,
        fingerprint: Some(of.identities.presented(None).fingerprint().0),
        tunnel_key: Some(*of.tunnel_secrets.own.public()),
        ..Member::new("a".into(), 1)
    };
    Arc::new(MembershipView { number, members: vec![member], ..MembershipView::default() })
}

fn left(view: &Arc<MembershipView>) -> LeftMembership {
    let successors = BTreeMap::from([("b".into(), KnownSuccessor { named: 5, successor: 6 })]);
    LeftMembership { view: view.clone(), ttl: Duration::from_millis(540), successors }
}

struct Host(TempDir);

impl Host {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("a.membership")
    }

    /// Starts the next process of gateway `a`.
    fn start(&self, incarnation: u64) -> Inheritance {
        self.start_at(incarnation, ORIGIN)
    }

    fn start_at(&self, incarnation: u64, origin: Origin) -> Inheritance {
        inherit(Some((self.path(), origin)), "a", incarnation, &Tasks::default()).unwrap()
    }

    /// A process leaves this membership, and has written it.
    async fn leave(&self, process: &Inheritance, membership: &LeftMembership) {
        process.writer.as_ref().unwrap().leave(membership.clone());
        while read(&self.path()).unwrap().unwrap().membership().as_ref() != Some(membership) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

fn inherited_key(process: &Inheritance) -> Option<[u8; 32]> {
    process.tunnel_secrets.inherited.as_ref().map(|secret| *secret.public())
}

fn presents(process: &Inheritance, view: &MembershipView) -> bool {
    let named = view.member("a").unwrap().fingerprint.map(Fingerprint);
    Some(process.identities.presented(named).fingerprint()) == named
}

#[tokio::test]
async fn a_process_inherits_view_keys_and_place_of_its_predecessors() {
    let host = Host::new();
    let first = host.start(11);
    assert_eq!((first.claim.clone(), first.membership.clone()), (Claim::new(11, vec![]), None));
    let named = view(4, 11, &first);
    host.leave(&first, &left(&named)).await;
    assert_eq!(fs::metadata(host.path()).unwrap().permissions().mode() & 0o777, FORMAT.mode);

    let second = host.start(12);
    assert_eq!(second.claim, Claim::new(12, vec![11]));
    assert_eq!(second.membership, Some(left(&named)));
    assert_eq!(inherited_key(&second), Some(*first.tunnel_secrets.own.public()));
    assert!(presents(&second, &named), "the certificate that peers expect");
    // It ends before the server has named it, and before it has left anything.
    let third = host.start(13);
    assert_eq!((third.claim.clone(), third.membership.clone()), (Claim::new(13, vec![11, 12]), Some(left(&named))));
    assert!(presents(&third, &named) && inherited_key(&third) == inherited_key(&second));

    // The server names it: the keys of the first process are gone.
    let named_third = view(5, 13, &third);
    host.leave(&third, &left(&named_third)).await;
    let fourth = host.start(14);
    assert_eq!(fourth.claim, Claim::new(14, vec![11, 12, 13]));
    assert!(presents(&fourth, &named_third) && !presents(&fourth, &named));
    assert_eq!(inherited_key(&fourth), Some(*third.tunnel_secrets.own.public()));
}

#[tokio::test]
async fn what_a_process_leaves_last_is_written_before_it_ends() {
    let (host, tasks) = (Host::new(), Tasks::default());
    let process = inherit(Some((host.path(), ORIGIN)), "a", 11, &tasks).unwrap();
    let last = left(&view(4, 11, &process));
    process.writer.as_ref().unwrap().leave(last.clone());
    drop(process);
    assert!(tasks.stop(Duration::from_secs(20)).await);
    assert_eq!(read(&host.path()).unwrap().unwrap().membership(), Some(last));
}

#[test]
fn a_file_that_cannot_be_read_for_the_moment_is_not_replaced() {
    let host = Host::new();
    // Nothing is mapped at address 0: reading fails with EIO.
    symlink("/proc/self/mem", host.path()).unwrap();
    assert!(inherit(Some((host.path(), ORIGIN)), "a", 11, &Tasks::default()).is_err());
    assert!(fs::symlink_metadata(host.path()).unwrap().is_symlink());
}

#[tokio::test]
async fn a_file_of_another_directory_or_boot_or_a_damaged_one_is_not_used() {
    let host = Host::new();
    let first = host.start(11);
    host.leave(&first, &left(&view(4, 11, &first))).await;
    let written = fs::read(host.path()).unwrap();
    let others = [Origin { boot: [9; 16], ..ORIGIN }, Origin { device: 9, ..ORIGIN }, Origin { inode: 9, ..ORIGIN }];
    for origin in others {
        fs::write(host.path(), &written).unwrap();
        let process = host.start_at(12, origin);
        assert_eq!((process.claim.clone(), process.membership.clone()), (Claim::new(12, vec![]), None), "{origin:?}");
        assert_eq!(inherited_key(&process), None);
    }
    let mut changed = written.clone();
    *changed.last_mut().unwrap() ^= 1;
    for damaged in [&b"something else"[..], &written[..written.len() / 2], &changed, &[]] {
        fs::write(host.path(), damaged).unwrap();
        let process = host.start(12);
        assert_eq!((process.claim.clone(), process.membership.clone()), (Claim::new(12, vec![]), None));
    }
    // Without a lock of the directory.
    let process = inherit(None, "a", 12, &Tasks::default()).unwrap();
    assert!(process.writer.is_none() && process.membership.is_none() && process.claim.predecessors.is_empty());
}
