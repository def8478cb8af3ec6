//! Where policy servers are: every address of every configured URL, tried in turn. Of several servers one alone may
//! decide membership, and a name may still have the address of one that is dead.

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::timeout;
use tonic::transport::Uri;

use crate::config::PolicyServer;

/// Timeouts of looking a name up: if its addresses are known from before, and if not.
const LOOKUP_TIMEOUT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// A server, or one of several with the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) url: String,
    /// Its address; `None`: the name could not be looked up.
    pub(crate) address: Option<SocketAddr>,
}

impl Target {
    /// The first URL, wherever it leads to.
    pub(crate) fn first(server: &PolicyServer) -> Self {
        Self { url: server.url.clone(), address: None }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_name = host_and_port(&self.url).is_some_and(|(host, _)| host.parse::<IpAddr>().is_err());
        match self.address.filter(|_| is_name) {
            Some(address) => write!(f, "{} ({address})", self.url),
            None => f.write_str(&self.url),
        }
    }
}

/// The targets of a configuration. Names are looked up at the beginning of each round.
#[derive(Debug)]
pub(crate) struct TargetList {
    urls: Vec<String>,
    /// Those of the last round.
    known: Vec<Target>,
    /// Those left in this round.
    pending: VecDeque<Target>,
    preferred: Option<Target>,
}

impl TargetList {
    pub(crate) fn new(server: &PolicyServer) -> Self {
        let urls = std::iter::once(&server.url).chain(&server.other_urls).cloned().collect();
        Self { urls, known: Vec::new(), pending: VecDeque::new(), preferred: None }
    }

    /// The next target; after the last one of a round, another round begins.
    pub(crate) async fn next(&mut self) -> Target {
        if self.pending.is_empty() {
            self.begin_round().await;
        }
        self.pending.pop_front().unwrap_or_else(|| Target { url: self.urls[0].clone(), address: None })
    }

    /// Whether there are targets left in this round.
    pub(crate) fn has_more(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Begins further rounds with this target, if it is still one.
    pub(crate) fn prefer(&mut self, target: &Target) {
        self.preferred = Some(target.clone());
    }

    async fn begin_round(&mut self) {
        let mut found: Vec<Target> = Vec::new();
        for url in &self.urls {
            let before = self.known.iter().filter(|target| target.url == *url && target.address.is_some());
            let before: Vec<Target> = before.cloned().collect();
            let limit = if before.is_empty() { LOOKUP_TIMEOUT.1 } else { LOOKUP_TIMEOUT.0 };
            let now = timeout(limit, look_up(url)).await.unwrap_or_default();
            found.extend(match (now.is_empty(), before.is_empty()) {
                (false, _) => {
                    now.into_iter().map(|address| Target { url: url.clone(), address: Some(address) }).collect()
                }
                // As long as it can't be looked up, it has the addresses that it had.
                (true, false) => before,
                (true, true) => vec![Target { url: url.clone(), address: None }],
            });
        }
        self.known.clone_from(&found);
        // Stable: the others stay in their order.
        found.sort_by_key(|target| Some(target) != self.preferred.as_ref());
        self.pending = found.into();
    }
}

/// The addresses of a URL; none: it can't be looked up.
async fn look_up(url: &str) -> Vec<SocketAddr> {
    let Some((host, port)) = host_and_port(url) else { return Vec::new() };
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in lookup_host((host, port)).await.into_iter().flatten() {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

/// Host, without brackets, and port of a URL.
pub(super) fn host_and_port(url: &str) -> Option<(String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let default_port = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    Some((host, uri.port_u16().unwrap_or(default_port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::fixtures::policy_server;

    async fn round(targets: &mut TargetList) -> Vec<String> {
        let mut all = vec![targets.next().await.to_string()];
        while targets.has_more() {
            all.push(targets.next().await.to_string());
        }
        all
    }

    #[tokio::test]
    async fn all_are_tried_in_turn_and_the_preferred_one_first() {
        let urls = ["http://192.0.2.1:1", "https://[2001:db8::1]", "http://192.0.2.3:3"];
        let mut targets = TargetList::new(&policy_server(&urls));
        assert_eq!(round(&mut targets).await, urls);
        let last = targets.known[2].clone();
        assert_eq!(targets.known[1].address, Some("[2001:db8::1]:443".parse().unwrap()));
        targets.prefer(&last);
        assert_eq!(round(&mut targets).await, [urls[2], urls[0], urls[1]]);
        // One that is no target any more changes nothing.
        targets.prefer(&Target { url: urls[1].to_owned(), address: None });
        assert_eq!(round(&mut targets).await, urls);
    }

    #[tokio::test]
    async fn a_name_that_cannot_be_looked_up_keeps_its_addresses() {
        let mut targets = TargetList::new(&policy_server(&["http://nowhere.invalid:1"]));
        assert_eq!(targets.next().await, Target { url: "http://nowhere.invalid:1".to_owned(), address: None });
        assert!(!targets.has_more());
        let known = Target { address: Some("192.0.2.1:1".parse().unwrap()), ..targets.known[0].clone() };
        targets.known = vec![known.clone()];
        assert_eq!(targets.next().await, known);
        assert_eq!(known.to_string(), "http://nowhere.invalid:1 (192.0.2.1:1)");
    }
}
