//! What a process leaves to the next one on its host, so that this can take its place while the policy server is away:
//! the keys that peers know, the last view, and which processes of peers count. One file beside the session tables
//! (`sessions.state`), as secret as the process secret; see `membership/succession.rs`.
//!
//! It is used only if it says that it was written since the last boot by a process that had the same directory of session
//! tables locked. This process has that lock, so the writer has ended.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::sync::watch;
use vipgate_common::{Tasks, spawn_blocking};

use crate::command_error::CommandError;
use crate::gateway::session_store::{Origin, read_left};
use crate::membership::MembershipView;
use crate::membership::succession::{Claim, KnownSuccessor};
use crate::peer::{Fingerprint, Identities, Identity, TunnelSecret};
use crate::replaced_file::Format;
use crate::xds::proto;

/// Readable by root only.
const FORMAT: Format = Format { name: "membership", version: 1, mode: 0o600 };

/// The membership that a process leaves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LeftMembership {
    /// The last view; number 0: none.
    pub(super) view: Arc<MembershipView>,
    /// Duration of a lease.
    pub(super) ttl: Duration,
    /// The processes of peers that count in place of those in the view.
    pub(super) successors: BTreeMap<Arc<str>, KnownSuccessor>,
}

/// The keys of a process's tunnels.
#[derive(Debug)]
pub(super) struct TunnelSecrets {
    pub(super) own: TunnelSecret,
    /// Of a predecessor.
    pub(super) inherited: Option<TunnelSecret>,
}

/// What a process has of its predecessors, and its own keys.
pub(super) struct Inheritance {
    pub(super) claim: Claim,
    pub(super) identities: Identities,
    pub(super) tunnel_secrets: TunnelSecrets,
    /// The membership when the predecessor has ended.
    pub(super) membership: Option<LeftMembership>,
    /// Writes for the next process; `None`: it inherits nothing.
    pub(super) writer: Option<Writer>,
}

/// The file.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
struct Stored {
    #[prost(bytes = "vec", tag = "1")]
    boot: Vec<u8>,
    #[prost(uint64, tag = "2")]
    device: u64,
    #[prost(uint64, tag = "3")]
    inode: u64,
    /// The processes of this gateway, the writer last.
    #[prost(fixed64, repeated, tag = "4")]
    processes: Vec<u64>,
    /// The writer's keys, and those of a predecessor if the view has its certificate.
    #[prost(message, repeated, tag = "5")]
    keys: Vec<StoredKeys>,
    #[prost(message, optional, tag = "6")]
    view: Option<proto::View>,
    #[prost(uint32, tag = "7")]
    ttl_ms: u32,
    #[prost(message, repeated, tag = "8")]
    successors: Vec<StoredSuccessor>,
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
struct StoredKeys {
    #[prost(bytes = "vec", tag = "1")]
    certificate: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    tunnel_secret: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct StoredSuccessor {
    #[prost(string, tag = "1")]
    gateway: String,
    #[prost(fixed64, tag = "2")]
    named: u64,
    #[prost(fixed64, tag = "3")]
    successor: u64,
}

impl StoredKeys {
    fn new(identity: &Identity, tunnel_secret: &TunnelSecret) -> Self {
        Self {
            certificate: identity.certificate().to_vec(),
            key: identity.key().to_vec(),
            tunnel_secret: tunnel_secret.to_bytes().to_vec(),
        }
    }

    fn fingerprint(&self) -> [u8; 32] {
        Fingerprint::of(&self.certificate.as_slice().into()).0
    }

    /// As keys; `None` if they are damaged.
    fn load(&self) -> Option<(Identity, TunnelSecret)> {
        let identity = Identity::load(self.certificate.clone(), self.key.clone()).ok()?;
        let tunnel_secret = TunnelSecret::new(self.tunnel_secret.as_slice().try_into().ok()?);
        Some((identity, tunnel_secret))
    }
}

impl Stored {
    fn is_of(&self, origin: &Origin) -> bool {
        self.boot == origin.boot && (self.device, self.inode) == (origin.device, origin.inode)
    }

    /// The membership that the process left; `None`: it had none, or it is damaged.
    fn membership(&self) -> Option<LeftMembership> {
        let view = MembershipView::try_from(self.view.clone()?).ok()?;
        let successor = |it: &StoredSuccessor| {
            (Arc::from(it.gateway.as_str()), KnownSuccessor { named: it.named, successor: it.successor })
        };
        Some(LeftMembership {
            view: Arc::new(view),
            ttl: Duration::from_millis(self.ttl_ms.into()),
            successors: self.successors.iter().map(successor).collect(),
        })
    }

    fn set_membership(&mut self, membership: &LeftMembership) {
        let successor = |(gateway, it): (&Arc<str>, &KnownSuccessor)| StoredSuccessor {
            gateway: gateway.to_string(),
            named: it.named,
            successor: it.successor,
        };
        self.view = Some((&*membership.view).into());
        self.ttl_ms = u32::try_from(membership.ttl.as_millis()).unwrap_or(u32::MAX);
        self.successors = membership.successors.iter().map(successor).collect();
    }

    /// Keeps the writer's keys, which are the last ones, and those of the certificate that a gateway has in the view.
    fn retain_keys(&mut self, name: &str, view: &MembershipView) {
        let named = view.member(name).and_then(|member| member.fingerprint);
        let own = self.keys.pop();
        self.keys.retain(|keys| Some(keys.fingerprint()) == named);
        self.keys.extend(own);
    }
}

/// Takes what the previous process has left in a file, and writes it for the next one. Without a file, or if its origin
/// isn't this one, nothing is inherited. `incarnation` is this process, `tasks` what the writer is among.
///
/// # Errors
/// When no keys can be generated, or the file can't be read for the moment.
pub(super) fn inherit(
    file: Option<(PathBuf, Origin)>,
    name: &str,
    incarnation: u64,
    tasks: &Tasks,
) -> Result<Inheritance, CommandError> {
    let no_random = |error| CommandError::runtime(error).context("cannot get random bytes from the kernel");
    let own = Identity::generate().map_err(CommandError::runtime)?;
    let tunnel_secret = TunnelSecret::generate().map_err(no_random)?;
    let former = match &file {
        Some((path, origin)) => read(path)?.filter(|stored| stored.is_of(origin)).unwrap_or_default(),
        None => Stored::default(),
    };
    let membership = former.membership();
    let claim = Claim::new(incarnation, former.processes.clone());
    let mut next = Stored { keys: former.keys.clone(), ..Stored::default() };
    next.keys.push(StoredKeys::new(&own, &tunnel_secret));
    let left = membership.clone().unwrap_or_default();
    next.retain_keys(name, &left.view);
    let (identity, inherited_secret) = match &*next.keys {
        [former, _] => former.load().unzip(),
        _ => (None, None),
    };
    let writer = file.map(|(path, origin)| {
        (next.boot, next.device, next.inode) = (origin.boot.to_vec(), origin.device, origin.inode);
        next.processes.clone_from(&claim.predecessors);
        next.processes.push(incarnation);
        if membership.is_some() {
            next.set_membership(&left);
        }
        write(&path, &next);
        Writer::start(path, name.into(), next, tasks)
    });
    Ok(Inheritance {
        claim,
        identities: Identities::new(own, identity),
        tunnel_secrets: TunnelSecrets { own: tunnel_secret, inherited: inherited_secret },
        membership,
        writer,
    })
}

fn read(path: &Path) -> Result<Option<Stored>, CommandError> {
    Ok(read_left(path, &FORMAT)?.and_then(|content| Stored::decode(&*content).ok()))
}

/// Writes the file. If that fails, the next process may have to wait for the policy server.
fn write(path: &Path, stored: &Stored) {
    if let Err(error) = FORMAT.write(path, &stored.encode_to_vec()) {
        let file = path.display();
        tracing::warn!(
            event = "state_lost",
            %file,
            %error,
            "cannot store the membership: after a restart this gateway waits for the policy server"
        );
    }
}

/// Writes the latest membership for the next process, in a task of its own. When this is dropped, it writes what isn't
/// written yet, and ends.
#[derive(Debug)]
pub(super) struct Writer(watch::Sender<LeftMembership>);

impl Writer {
    fn start(path: PathBuf, name: Arc<str>, mut stored: Stored, tasks: &Tasks) -> Self {
        let (sender, mut receiver) = watch::channel(LeftMembership::default());
        tasks.spawn("membership file", async move {
            while receiver.changed().await.is_ok() {
                let membership = receiver.borrow_and_update().clone();
                stored.retain_keys(&name, &membership.view);
                stored.set_membership(&membership);
                let (path, stored) = (path.clone(), stored.clone());
                spawn_blocking(move || write(&path, &stored)).await;
            }
        });
        Self(sender)
    }

    /// Leaves this membership to the next process.
    pub(super) fn leave(&self, membership: LeftMembership) {
        self.0.send_if_modified(|left| {
            let is_new = *left != membership;
            *left = membership;
            is_new
        });
    }
}

#[cfg(test)]
mod tests;
