use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn live(vip: &str, private: &str) -> PrivateVip {
    PrivateVip { vip: ip(vip), private: ip(private), retired: false }
}

fn retired(vip: &str, private: &str) -> PrivateVip {
    PrivateVip { retired: true, ..live(vip, private) }
}

/// The VIP and private address that each of these are translated to, if any.
fn translated(all: &[PrivateVip]) -> Vec<(Option<u32>, Option<u32>)> {
    let vips = all.iter().filter(|it| !it.retired).map(|it| it.vip).collect();
    let nat = StaticNat::new(all, &vips);
    assert_eq!(nat.is_empty(), nat.received.v4.is_empty() && nat.received.v6.is_empty());
    let of = |address: IpAddr, map: &Map| match address {
        IpAddr::V4(v4) => map.v4.get(&v4.to_bits()).copied(),
        IpAddr::V6(_) => None,
    };
    all.iter().map(|it| (of(it.private, &nat.received), of(it.vip, &nat.sent))).collect()
}

const fn both(vip: [u8; 4], private: [u8; 4]) -> (Option<u32>, Option<u32>) {
    (Some(u32::from_be_bytes(vip)), Some(u32::from_be_bytes(private)))
}

const NONE: (Option<u32>, Option<u32>) = (None, None);
const FIRST: (Option<u32>, Option<u32>) = both([192, 0, 2, 1], [10, 0, 0, 1]);

#[test]
fn an_ambiguous_private_address_is_not_translated() {
    let first = live("192.0.2.1", "10.0.0.1");
    assert_eq!(translated(&[first, live("192.0.2.2", "10.0.0.2")]), [FIRST, both([192, 0, 2, 2], [10, 0, 0, 2])]);
    assert_eq!(translated(&[first, live("192.0.2.2", "10.0.0.1"), live("192.0.2.3", "10.0.0.1")]), [NONE; 3]);
    assert_eq!(translated(&[live("192.0.2.1", "192.0.2.2"), live("192.0.2.2", "192.0.2.2")]), [NONE; 2]);
    assert_eq!(translated(&[live("192.0.2.1", "2001:db8::1")]), [NONE], "of another family");
    assert_eq!(translated(&[]), []);
}

#[test]
fn a_retired_vip_keeps_its_private_address_until_a_live_one_has_it() {
    let (old, new) = (retired("192.0.2.1", "10.0.0.1"), live("192.0.2.2", "10.0.0.1"));
    assert_eq!(translated(&[old]), [FIRST]);
    assert_eq!(translated(&[old, live("192.0.2.2", "10.0.0.2")])[0], FIRST);
    for all in [[old, new], [new, old]] {
        let nat = StaticNat::new(&all, &[new.vip].into_iter().collect());
        assert_eq!(nat.addresses().collect::<Vec<_>>(), [(new.private, new.vip)]);
        assert_eq!(nat.sent.v4.len(), 1, "the retired one has none");
    }
    assert_eq!(translated(&[old, live("10.0.0.1", "10.0.0.9")])[0], NONE, "its private address is a VIP now");
    assert_eq!(translated(&[old, retired("192.0.2.3", "10.0.0.1")]), [NONE; 2]);
}

#[test]
fn retired_vips_are_not_listed() {
    let all = [retired("192.0.2.1", "10.0.0.1"), live("2001:db8::1", "fd00::1")];
    let nat = StaticNat::new(&all, &[all[1].vip].into_iter().collect());
    assert_eq!(nat.addresses().collect::<Vec<_>>(), [(ip("fd00::1"), ip("2001:db8::1"))]);
}
