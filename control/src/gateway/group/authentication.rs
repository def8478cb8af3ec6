//! Authentication of tunnels: what follows of the keys that the view shows for the engine. A gateway that has shown a key is believed by
//! tags alone from then on, and one that starts anew by the key of the process before it, too, for as long as views take to spread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::snapshot::members::Authentication;
use vipgate_dataplane::wire::tunnel_tag::TagKey;

use crate::config::PeerAuthentication;
use crate::members::View;
use crate::peer::{End, TagKeys, TunnelKey, TunnelSecret};

/// The keys of this gateway and of all others.
#[derive(Debug, Default)]
pub(super) struct Tunnels {
    rule: PeerAuthentication,
    own: Option<TunnelSecret>,
    others: BTreeMap<Arc<str>, Shown>,
}

/// What another gateway has shown last.
#[derive(Debug)]
struct Shown {
    incarnation: u64,
    /// Its key and what follows of it; `None`: it has none, or one of no use.
    key: Option<(TunnelKey, Option<TagKeys>)>,
    /// What its last process sent, and until when that is still taken.
    before: Option<(TagKey, Instant)>,
}

impl Tunnels {
    pub(super) fn new(rule: PeerAuthentication, own: Option<TunnelSecret>) -> Self {
        Self { rule, own, others: BTreeMap::new() }
    }

    /// Takes in a view. `ttl`: so long after a view was made, nobody goes by the one before.
    pub(super) fn see(&mut self, name: &str, view: &View, now: Instant, ttl: Duration) {
        let Some(own) = &self.own else { return };
        self.others.retain(|other, _| view.member(other).is_some());
        // Who isn't shown this one's key can't make tags for it, so none are asked of anybody.
        let is_shown = view.member(name).is_some_and(|this| this.tunnel_key == Some(*own.public()));
        for member in view.members.iter().filter(|member| *member.name != *name && member.incarnation != 0) {
            let known = self.others.get(&member.name);
            let key = member.tunnel_key.filter(|_| is_shown);
            if known.is_some_and(|it| it.is_of(member.incarnation, key)) {
                continue;
            }
            let key = key.map(|key| (key, own.keys_with(name, End { name: &member.name, key: &key })));
            let before = known.and_then(Shown::keys).map(|keys| (keys.taken, now + ttl));
            self.others.insert(member.name.clone(), Shown { incarnation: member.incarnation, key, before });
        }
    }

    /// How packets between a gateway and this one are authenticated.
    pub(super) fn with(&self, name: &str, now: Instant) -> Authentication {
        match self.others.get(name) {
            Some(shown) if shown.key.is_some() => match shown.keys() {
                Some(TagKeys { sent, taken }) => {
                    let before = shown.before.filter(|(_, until)| now < *until).map(|(key, _)| key);
                    Authentication::Tagged { sent, taken: [Some(taken), before] }
                }
                None => Authentication::Refused,
            },
            // Nobody has heard of it, so it sends nothing.
            None if self.own.is_some() => Authentication::Refused,
            // An older version, which has no key, or no server by which keys come.
            Some(_) | None => self.without_key(),
        }
    }

    /// How they are where no keys are shown.
    pub(super) fn without_key(&self) -> Authentication {
        match self.rule {
            PeerAuthentication::Offered => Authentication::None,
            PeerAuthentication::Required => Authentication::Refused,
        }
    }

    /// When the next key stops to count.
    pub(super) fn due(&self) -> impl Iterator<Item = Instant> {
        self.others.values().filter_map(|shown| shown.before.map(|(_, until)| until))
    }
}

impl Shown {
    /// Whether it is the same process, with the same key or none any more: a server that has forgotten takes nothing back.
    fn is_of(&self, incarnation: u64, key: Option<TunnelKey>) -> bool {
        self.incarnation == incarnation && (key.is_none() || key == self.key.as_ref().map(|(key, _)| *key))
    }

    fn keys(&self) -> Option<TagKeys> {
        self.key.as_ref()?.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::Member;

    const TTL: Duration = Duration::from_millis(600);

    fn view(members: &[(&str, u64, Option<TunnelKey>)]) -> View {
        let member = |(name, incarnation, tunnel_key): &(&str, u64, Option<TunnelKey>)| Member {
            incarnation: *incarnation,
            tunnel_key: *tunnel_key,
            ..Member::new((*name).into(), 1)
        };
        View { number: 1, members: members.iter().map(member).collect(), ..View::default() }
    }

    fn tunnels(rule: PeerAuthentication) -> (Tunnels, TunnelKey) {
        let own = TunnelSecret::generate().unwrap();
        let public = *own.public();
        (Tunnels::new(rule, Some(own)), public)
    }

    /// What `b` makes of `a`'s key: what it sends, and what it takes.
    fn at_b(b: &TunnelSecret, a: &TunnelKey) -> TagKeys {
        b.keys_with("b", End { name: "a", key: a }).unwrap()
    }

    #[test]
    fn a_restarted_gateway_is_believed_by_both_keys_until_views_have_spread() {
        let (mut tunnels, own) = tunnels(PeerAuthentication::Required);
        let [first, second] = [(); 2].map(|()| TunnelSecret::generate().unwrap());
        let now = Instant::now();
        assert_eq!(tunnels.with("b", now), Authentication::Refused, "nobody has heard of it");
        tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 7, Some(*first.public()))]), now, TTL);
        let keys = at_b(&first, &own);
        let only = Authentication::Tagged { sent: keys.taken, taken: [Some(keys.sent), None] };
        assert_eq!(tunnels.with("b", now), only);
        // The server has started anew and not heard of it yet.
        tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 0, None)]), now, TTL);
        assert_eq!(tunnels.with("b", now), only);
        tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 8, Some(*second.public()))]), now, TTL);
        let after = at_b(&second, &own);
        let both = Authentication::Tagged { sent: after.taken, taken: [Some(after.sent), Some(keys.sent)] };
        assert_eq!(tunnels.with("b", now), both);
        assert_eq!(tunnels.due().collect::<Vec<_>>(), [now + TTL]);
        // Another view changes nothing about it.
        tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 8, Some(*second.public()))]), now + TTL / 2, TTL);
        assert_eq!(tunnels.with("b", now + TTL / 2), both);
        let last = Authentication::Tagged { sent: after.taken, taken: [Some(after.sent), None] };
        assert_eq!(tunnels.with("b", now + TTL), last);
        tunnels.see("a", &view(&[("a", 1, Some(own))]), now, TTL);
        assert_eq!(tunnels.with("b", now), Authentication::Refused, "policy names it no more");
    }

    #[test]
    fn nobody_is_asked_for_tags_who_is_not_shown_this_ones_key() {
        let (mut tunnels, own) = tunnels(PeerAuthentication::Offered);
        let (other, now) = (TunnelSecret::generate().unwrap(), Instant::now());
        // A server that is brought up to date while gateways run hears of one before the other.
        tunnels.see("a", &view(&[("a", 1, None), ("b", 7, Some(*other.public()))]), now, TTL);
        assert_eq!(tunnels.with("b", now), Authentication::None);
        tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 7, Some(*other.public()))]), now, TTL);
        assert!(matches!(tunnels.with("b", now), Authentication::Tagged { taken: [Some(_), None], .. }));
    }

    #[test]
    fn who_shows_no_key_is_taken_in_where_none_is_required() {
        let now = Instant::now();
        for (rule, outcome) in [
            (PeerAuthentication::Offered, Authentication::None),
            (PeerAuthentication::Required, Authentication::Refused),
        ] {
            let (mut tunnels, own) = tunnels(rule);
            let other = TunnelSecret::generate().unwrap();
            tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 7, None)]), now, TTL);
            assert_eq!(tunnels.with("b", now), outcome);
            assert_eq!(Tunnels::new(rule, None).with("b", now), outcome, "no server shows keys");
            // It is brought up to date, and back; a process that has shown a key can't be without.
            let with = view(&[("a", 1, Some(own)), ("b", 8, Some(*other.public()))]);
            tunnels.see("a", &with, now, TTL);
            assert!(matches!(tunnels.with("b", now), Authentication::Tagged { taken: [Some(_), None], .. }));
            tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 8, None)]), now, TTL);
            assert!(matches!(tunnels.with("b", now), Authentication::Tagged { .. }));
            tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 9, None)]), now, TTL);
            assert_eq!(tunnels.with("b", now), outcome);
            // A key of no use is none that could be believed.
            tunnels.see("a", &view(&[("a", 1, Some(own)), ("b", 10, Some([0; 32]))]), now, TTL);
            assert_eq!(tunnels.with("b", now), Authentication::Refused);
        }
    }
}
