//! `vipgate certificates`: makes and renews the certificates of a policy server and its gateways, and makes what agents of
//! nodes need beside their tokens, in Secrets of the Kubernetes API. It runs once and ends; a Job runs it at the
//! installation, a CronJob each day.
//!
//! ```text
//!   names          what may be in a certificate, and be a key of a Secret
//!   authority      the CA: certificate and key, made, read, renewed; signs
//!   certificate    a certificate and its key: which defect it has
//!   secret         what becomes of each Secret (pure: Secrets and the time are arguments)
//!   pass           reads, decides, writes: again when somebody else has written
//!   api            the requests
//! ```
//! A certificate that has no defect is kept byte for byte, and nothing is written when nothing changes.

mod api;
mod authority;
mod certificate;
mod error;
#[cfg(test)]
mod fixtures;
mod names;
mod pass;
mod secret;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use self::api::SecretApi;
use self::error::CertificatesError;
pub(crate) use self::names::{DnsName, GatewayNames, NamePattern};
use self::secret::Subjects;

/// Which certificates there are to be, and in which Secrets.
#[derive(Clone, Debug)]
pub(crate) struct Specification {
    /// Secret of the CA.
    pub(crate) ca: String,
    /// Secret of the policy server, and its names.
    pub(crate) server: Option<(String, Vec<DnsName>)>,
    /// Those of the gateways.
    pub(crate) gateways: Option<Gateways>,
    /// Secret of the agents of nodes: the CA's certificate alone.
    pub(crate) nodes: Option<String>,
    /// Secret with the tunnels' secret.
    pub(crate) tunnels: Option<String>,
    /// How long certificates are valid.
    pub(crate) validity: Duration,
    /// How long before their end they are renewed.
    pub(crate) renew_before: Duration,
    /// ConfigMap that owns the Secrets: the API server deletes them with it.
    pub(crate) owner: Option<String>,
}

/// The gateways' Secrets, one each: a Secret that a node can read has no other gateway's key.
#[derive(Clone, Debug)]
pub(crate) struct Gateways {
    /// Their names.
    pub(crate) secrets: NamePattern,
    /// DaemonSets that own them in place of the ConfigMap, so that a Secret goes with its gateway.
    pub(crate) owners: Option<NamePattern>,
    /// Names of the gateways.
    pub(crate) names: Vec<DnsName>,
}

/// Where the Secrets are.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    /// Their namespace. Default: that of the pod, or of the kubeconfig's context.
    pub(crate) namespace: Option<String>,
    /// kubeconfig file. Default: the service account of the pod.
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// A Secret that there is to be, besides that of the CA.
struct Wanted<'a> {
    name: String,
    subjects: Subjects<'a>,
    owner: Option<Owner>,
}

/// An object that owns a Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Owner {
    ConfigMap(String),
    DaemonSet(String),
}

impl Specification {
    /// The name of a Secret that two of them would have.
    pub(crate) fn ambiguous_secret(&self) -> Option<String> {
        let mut names: Vec<String> = self.secrets().map(|it| it.name).chain([self.ca.clone()]).collect();
        names.sort_unstable();
        names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0].clone())
    }

    fn owner(&self) -> Option<Owner> {
        self.owner.clone().map(Owner::ConfigMap)
    }

    /// The Secrets besides that of the CA.
    fn secrets(&self) -> impl Iterator<Item = Wanted<'_>> {
        let server = self.server.iter().map(|(secret, names)| (secret, Subjects::Server(names)));
        let nodes = self.nodes.iter().map(|secret| (secret, Subjects::Nodes));
        let tunnels = self.tunnels.iter().map(|secret| (secret, Subjects::Tunnels));
        let others = server.chain(nodes).chain(tunnels);
        let others = others.map(|(name, subjects)| Wanted { name: name.clone(), subjects, owner: self.owner() });
        others.chain(self.gateways.iter().flat_map(|gateways| {
            gateways.names.iter().map(|gateway| Wanted {
                name: gateways.secrets.name_of(gateway),
                subjects: Subjects::Gateway(gateway),
                owner: gateways.owners.as_ref().map_or(self.owner(), |it| Some(Owner::DaemonSet(it.name_of(gateway)))),
            })
        }))
    }
}

/// Makes and renews what is missing or due; passes on a line for each thing done.
///
/// # Errors
/// If the API can't be reached, it refuses a request, or a Secret is one that must not be replaced.
pub(crate) async fn run(
    specification: &Specification,
    location: &Location,
    now: SystemTime,
    report: &mut impl FnMut(&str),
) -> Result<(), CertificatesError> {
    let mut api = SecretApi::connect(location).await?;
    pass::run(&mut api, specification, now, report).await
}
