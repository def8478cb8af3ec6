//! Tunnel authentication: derives tag keys from the public keys in the membership view. Packets of a gateway must carry
//! tags. After its restart, the key of its previous process is accepted, too, until all
//! gateways have the new view; while the view still has that key, this gateway uses what its predecessor has left.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::policy::members::Authentication;
use vipgate_dataplane::wire::tunnel_auth::TagKey;

use crate::membership::MembershipView;
use crate::peer::{TagKeys, TunnelEnd, TunnelKey, TunnelSecret};

/// The keys of this gateway and of its peers.
#[derive(Debug, Default)]
pub(super) struct TunnelAuthentication {
    own: Option<TunnelSecret>,
    /// The predecessor's.
    inherited: Option<TunnelSecret>,
    peers: BTreeMap<Arc<str>, PeerKeys>,
}

/// The keys that a peer has published last.
#[derive(Debug)]
struct PeerKeys {
    incarnation: u64,
    /// This gateway's public key.
    own: TunnelKey,
    /// The public key and the tag keys derived from it. `None`: no key was published; no tag keys: the public key is
    /// invalid.
    key: Option<(TunnelKey, Option<TagKeys>)>,
    /// Receive key of the peer's previous process, and until when it is accepted.
    previous: Option<(TagKey, Instant)>,
}

impl TunnelAuthentication {
    pub(super) fn new(own: Option<TunnelSecret>) -> Self {
        Self { own, inherited: None, peers: BTreeMap::new() }
    }

    /// The same with the key of a predecessor.
    pub(super) fn with_inherited(self, inherited: Option<TunnelSecret>) -> Self {
        Self { inherited, ..self }
    }

    /// Updates the keys from a view. After `ttl`, no gateway uses the previous view any more.
    pub(super) fn update(&mut self, name: &str, view: &MembershipView, now: Instant, ttl: Duration) {
        let named = view.member(name).and_then(|this| this.tunnel_key);
        let inherited = self.inherited.as_ref().filter(|secret| Some(*secret.public()) == named);
        let Some(own) = inherited.or(self.own.as_ref()) else { return };
        self.peers.retain(|peer, _| view.member(peer).is_some());
        // Peers can't create tags before they know this gateway's key.
        let is_published = named == Some(*own.public());
        for member in view.members.iter().filter(|member| *member.name != *name && member.incarnation != 0) {
            let known = self.peers.get(&member.name);
            let key = member.tunnel_key.filter(|_| is_published);
            if known.is_some_and(|it| it.own == *own.public() && it.matches(member.incarnation, key)) {
                continue;
            }
            let key = key.map(|key| (key, own.derive_tag_keys(name, TunnelEnd { name: &member.name, key: &key })));
            let previous = known.and_then(PeerKeys::tag_keys).map(|keys| (keys.receive_key, now + ttl));
            let (incarnation, own) = (member.incarnation, *own.public());
            self.peers.insert(member.name.clone(), PeerKeys { incarnation, own, key, previous });
        }
    }

    /// The authentication of packets to and from a peer. One without a valid key sends nothing that counts.
    pub(super) fn for_peer(&self, name: &str, now: Instant) -> Authentication {
        let known = self.peers.get(name).and_then(|peer| Some((peer.tag_keys()?, peer.previous)));
        let Some((TagKeys { transmit_key, receive_key }, previous)) = known else { return Authentication::Rejected };
        let previous = previous.filter(|(_, until)| now < *until).map(|(key, _)| key);
        Authentication::Tagged { transmit_key, receive_keys: [Some(receive_key), previous] }
    }

    /// The same of all peers with a known process.
    pub(super) fn all(&self, now: Instant) -> BTreeMap<Arc<str>, Authentication> {
        self.peers.keys().map(|name| (name.clone(), self.for_peer(name, now))).collect()
    }

    /// When keys of previous processes expire.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.peers.values().filter_map(|peer| peer.previous.map(|(_, until)| until))
    }
}

impl PeerKeys {
    /// Whether this is the same process, with the same key or without one: a restarted server may not know the key yet.
    fn matches(&self, incarnation: u64, key: Option<TunnelKey>) -> bool {
        self.incarnation == incarnation && (key.is_none() || key == self.key.as_ref().map(|(key, _)| *key))
    }

    fn tag_keys(&self) -> Option<TagKeys> {
        self.key.as_ref()?.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::Member;

    const TTL: Duration = Duration::from_millis(600);

    fn view(members: &[(&str, u64, Option<TunnelKey>)]) -> MembershipView {
        let member = |(name, incarnation, tunnel_key): &(&str, u64, Option<TunnelKey>)| Member {
            incarnation: *incarnation,
            tunnel_key: *tunnel_key,
            ..Member::new((*name).into(), 1)
        };
        MembershipView { number: 1, members: members.iter().map(member).collect(), ..MembershipView::default() }
    }

    fn tunnels() -> (TunnelAuthentication, TunnelKey) {
        let own = TunnelSecret::generate().unwrap();
        let public = *own.public();
        (TunnelAuthentication::new(Some(own)), public)
    }

    /// The tag keys that `b` derives from `a`'s public key.
    fn at_b(b: &TunnelSecret, a: &TunnelKey) -> TagKeys {
        b.derive_tag_keys("b", TunnelEnd { name: "a", key: a }).unwrap()
    }

    #[test]
    fn both_keys_of_a_restarted_gateway_are_accepted_until_the_ttl_has_passed() {
        let (mut tunnels, own) = tunnels();
        let [first, second] = [(); 2].map(|()| TunnelSecret::generate().unwrap());
        let now = Instant::now();
        assert_eq!(tunnels.for_peer("b", now), Authentication::Rejected, "not in any view");
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 7, Some(*first.public()))]), now, TTL);
        let keys = at_b(&first, &own);
        let only =
            Authentication::Tagged { transmit_key: keys.receive_key, receive_keys: [Some(keys.transmit_key), None] };
        assert_eq!(tunnels.for_peer("b", now), only);
        // The server has restarted and has no heartbeat of it yet.
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 0, None)]), now, TTL);
        assert_eq!(tunnels.for_peer("b", now), only);
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 8, Some(*second.public()))]), now, TTL);
        let after = at_b(&second, &own);
        let both = Authentication::Tagged {
            transmit_key: after.receive_key,
            receive_keys: [Some(after.transmit_key), Some(keys.transmit_key)],
        };
        assert_eq!(tunnels.for_peer("b", now), both);
        assert_eq!(tunnels.deadlines().collect::<Vec<_>>(), [now + TTL]);
        // A further view doesn't extend that.
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 8, Some(*second.public()))]), now + TTL / 2, TTL);
        assert_eq!(tunnels.for_peer("b", now + TTL / 2), both);
        let last =
            Authentication::Tagged { transmit_key: after.receive_key, receive_keys: [Some(after.transmit_key), None] };
        assert_eq!(tunnels.for_peer("b", now + TTL), last);
        tunnels.update("a", &view(&[("a", 1, Some(own))]), now, TTL);
        assert_eq!(tunnels.for_peer("b", now), Authentication::Rejected, "removed from policy");
    }

    #[test]
    fn a_predecessors_key_is_used_while_the_view_has_it() {
        let (predecessor, own, other) =
            (TunnelSecret::new([1; 32]), TunnelSecret::new([2; 32]), TunnelSecret::new([3; 32]));
        let (former, named, peer) = (*predecessor.public(), *own.public(), *other.public());
        let mut tunnels = TunnelAuthentication::new(Some(own)).with_inherited(Some(predecessor));
        let now = Instant::now();
        tunnels.update("a", &view(&[("a", 1, Some(former)), ("b", 7, Some(peer))]), now, TTL);
        let before = at_b(&other, &former);
        let only = Authentication::Tagged {
            transmit_key: before.receive_key,
            receive_keys: [Some(before.transmit_key), None],
        };
        assert_eq!(tunnels.for_peer("b", now), only);
        // The server names this process.
        tunnels.update("a", &view(&[("a", 2, Some(named)), ("b", 7, Some(peer))]), now, TTL);
        let after = at_b(&other, &named);
        let both = Authentication::Tagged {
            transmit_key: after.receive_key,
            receive_keys: [Some(after.transmit_key), Some(before.transmit_key)],
        };
        assert_eq!(tunnels.for_peer("b", now), both);
    }

    #[test]
    fn packets_are_rejected_before_the_view_contains_the_own_key() {
        let (mut tunnels, own) = tunnels();
        let (other, now) = (TunnelSecret::generate().unwrap(), Instant::now());
        tunnels.update("a", &view(&[("a", 1, None), ("b", 7, Some(*other.public()))]), now, TTL);
        assert_eq!(tunnels.for_peer("b", now), Authentication::Rejected);
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 7, Some(*other.public()))]), now, TTL);
        assert!(matches!(tunnels.for_peer("b", now), Authentication::Tagged { receive_keys: [Some(_), None], .. }));
    }

    #[test]
    fn packets_of_a_peer_without_a_valid_key_are_rejected() {
        let ((mut tunnels, own), now) = (tunnels(), Instant::now());
        let other = TunnelSecret::generate().unwrap();
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 7, None)]), now, TTL);
        assert_eq!(tunnels.for_peer("b", now), Authentication::Rejected);
        assert_eq!(TunnelAuthentication::new(None).for_peer("b", now), Authentication::Rejected);
        // A process that has published a key can't lose it.
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 8, Some(*other.public()))]), now, TTL);
        assert!(matches!(tunnels.for_peer("b", now), Authentication::Tagged { receive_keys: [Some(_), None], .. }));
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 8, None)]), now, TTL);
        assert!(matches!(tunnels.for_peer("b", now), Authentication::Tagged { .. }));
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 9, None)]), now, TTL);
        assert_eq!(tunnels.for_peer("b", now), Authentication::Rejected);
        tunnels.update("a", &view(&[("a", 1, Some(own)), ("b", 10, Some([0; 32]))]), now, TTL);
        assert_eq!(tunnels.for_peer("b", now), Authentication::Rejected);
    }
}
