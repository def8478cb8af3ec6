//! Against a slow model: whatever a server has been and however it tells what it is now, a gateway's policy is what
//! building all of it anew gives.

use super::world::{GATEWAYS, deal};
use super::*;
use crate::tally::{Tally, property};

/// Deals that follow each other, and how they are told.
fn story() -> impl Strategy<Value = (Vec<Deal>, u64, &'static str)> {
    (prop::collection::vec(deal(), 1..6), any::<u64>(), prop::sample::select(GATEWAYS.to_vec()))
}

/// An offer as a whole policy has it.
fn expected(deal: &Deal, gateway: &str, server: &Told) -> Seen {
    built(&deal.part_of(Some(&Viewer::named(gateway)), &server.version))
}

/// Counts what is in a change.
fn count(tally: &Tally, change: &PolicyChange) {
    let gone = &change.gone;
    for (class, count) in [
        ("vips", change.vips.len()),
        ("vips gone", gone.vips.len()),
        ("endpoints", change.endpoints.len()),
        ("endpoints gone", gone.endpoints.len()),
        ("services", change.services.len()),
        ("services gone", gone.services.len()),
        ("nothing", usize::from(change.is_empty())),
    ] {
        tally.add(class, count as u64);
    }
}

#[test]
fn a_gateway_has_what_the_server_has() {
    let classes =
        ["vips", "vips gone", "endpoints", "endpoints gone", "services", "services gone", "broken off", "g1", "g9"];
    property(ProptestConfig::default(), &story(), &classes, |(deals, seed, gateway), tally| {
        tally.count(gateway);
        let (mut dice, mut book, mut builder) = (Dice(seed), Book::default(), builder());
        let mut sum = Sum::default();
        let mut past = vec![Told::default()];
        for deal in &deals {
            let (before, server) = (past.last().unwrap(), Told::of(deal));
            if dice.once_in(3) {
                // A connection that breaks before all was said.
                let said = server.tell(before, &past, &mut dice);
                for response in said.iter().take(dice.roll(said.len() + 1)) {
                    book.stage(response.clone()).unwrap();
                }
                tally.add("broken off", u64::from(book.has_staged()));
                book.discard();
                prop_assert!(!book.has_staged());
            }
            for response in server.tell(before, &past, &mut dice) {
                book.stage(response).unwrap();
                prop_assert!(!book.is_whole());
            }
            book.stage(server.settle()).unwrap();
            prop_assert!(book.is_whole() && book.has_staged());
            prop_assert_eq!(book.held(), &before.held);

            let offer = book.offer(&Viewer::named(gateway));
            count(tally, &offer.change);
            let snapshot = builder.with_change(&offer.change).unwrap();
            prop_assert_eq!(seen(&snapshot.policy), expected(deal, gateway, &server));
            prop_assert_eq!(&offer.peers, &deal.peers);
            let set = deal.part_of(Some(&Viewer::named(gateway)), "");
            prop_assert_eq!(sum.change(&offer.change), (set.vips, set.endpoints, set.services));
            prop_assert_eq!(book.commit(), server.differences(before));
            prop_assert!(!book.has_staged() && !book.is_whole());
            prop_assert_eq!(book.held(), &server.held);
            prop_assert_eq!(book.version(), &server.version);
            past.push(server);
        }
        // The last thing once more says nothing new.
        let server = past.last().unwrap();
        book.stage(server.settle()).unwrap();
        prop_assert!(book.is_whole());
        let offer = book.offer(&Viewer::named(gateway));
        prop_assert!(offer.change.is_empty());
        prop_assert_eq!(&offer.change.version, &server.version);
        prop_assert_eq!(book.commit(), vec![]);
        Ok(())
    });
}

#[test]
fn a_gateway_goes_on_where_it_was() {
    let classes = ["vips", "vips gone", "endpoints", "endpoints gone", "services", "services gone"];
    property(ProptestConfig::default(), &story(), &classes, |(deals, seed, gateway), tally| {
        let mut dice = Dice(seed);
        let servers: Vec<_> = deals.iter().map(Told::of).collect();
        for (pair, deals) in servers.windows(2).zip(deals.windows(2)) {
            let [before, after] = pair else { unreachable!() };
            // What a cache held is offered as a whole.
            let (mut book, mut builder) = (Book::default(), builder());
            book.stage_held(before.held.clone()).unwrap();
            prop_assert!(book.is_whole());
            let snapshot = builder.with_change(&book.offer(&Viewer::named(gateway)).change).unwrap();
            prop_assert_eq!(seen(&snapshot.policy), expected(&deals[0], gateway, before));
            book.commit();
            for kind in Kind::ALL {
                let known = before.held.iter().filter(|(key, _)| key.kind == kind);
                let known: Vec<_> = known.map(|(key, held)| (key.name.to_string(), held.version.clone())).collect();
                prop_assert_eq!(book.versions(kind).collect::<Vec<_>>(), known);
            }
            // From there, differences are enough.
            for response in after.tell(before, &[], &mut dice).into_iter().chain([after.settle()]) {
                book.stage(response).unwrap();
            }
            let change = book.offer(&Viewer::named(gateway)).change;
            count(tally, &change);
            let snapshot = builder.with_change(&change).unwrap();
            prop_assert_eq!(seen(&snapshot.policy), expected(&deals[1], gateway, after));
        }
        Ok(())
    });
}

/// One VIP, held by one gateway or, without one, by all.
fn vip(address: &str, gateway: Option<&str>) -> Told {
    let share = |name: &str| ShareSpec { gateway: name.into(), blocks: None, backups: vec![] };
    let vip = VipSpec {
        address: ip(address),
        name: "".into(),
        announce: Announce::L2,
        reserved_ports: vec![],
        shares: gateway.map(share).into_iter().collect(),
    };
    Told::of(&Deal { vips: vec![vip], ..Deal::default() })
}

/// Who serves a VIP concerns them all: who had it, who has it, and who sends on what comes for it.
#[test]
fn every_gateway_hears_that_a_share_moves() {
    let (before, after) = (vip("203.0.113.1", Some("g1")), vip("203.0.113.1", Some("g2")));
    for gateway in GATEWAYS {
        let mut book = book_of(&before);
        for response in responses(&after.differences(&before)) {
            book.stage(response).unwrap();
        }
        let change = book.offer(&Viewer::named(gateway)).change;
        let homes: Vec<_> = change.vips.iter().flat_map(|vip| &vip.shares).map(|share| &*share.gateway).collect();
        assert_eq!((homes, change.gone.vips), (vec!["g2"], vec![]), "{gateway}");
    }
}

/// A name that means an address that is held, but isn't how resources are named, names nothing.
#[test]
fn what_was_never_there_does_not_go() {
    let server = vip("2001:db8::1", None);
    let mut book = book_of(&server);
    for name in ["2001:DB8::1", "2001:db8:0::1", "203.0.113.1", "x", ""] {
        for kind in Kind::ALL {
            book.stage(response(kind, &[(key(kind, name), None)])).unwrap();
        }
    }
    assert!(book.offer(&Viewer::named("g1")).change.is_empty());
    assert_eq!(book.commit(), []);
    assert_eq!(book.held(), &server.held);
    book.stage(response(Kind::Vip, &[(key(Kind::Vip, "2001:db8::1"), None)])).unwrap();
    assert_eq!(book.offer(&Viewer::named("g1")).change.gone.vips, [ip("2001:db8::1")]);
}
