//! Invalid private addresses of VIPs, and the errors with field and reason.

use prost::Message;

use super::super::super::proto;
use super::*;

const VIP: &str = "203.0.113.1";

#[test]
fn invalid_private_addresses_are_rejected_with_field_and_reason() {
    let error_with = |all: &[(&str, &str)]| {
        let private = |(gateway, address): &(&str, &str)| proto::PrivateAddress {
            gateway: (*gateway).to_owned(),
            address: (*address).to_owned(),
        };
        let private_addresses = all.iter().map(private).collect();
        let vip = proto::Vip { address: VIP.to_owned(), private_addresses, ..proto::Vip::default() };
        decode(Kind::Vip, VIP, &vip.encode_to_vec()).unwrap_err().to_string()
    };
    let cases: [(&[(&str, &str)], &str); 8] = [
        (&[("g1", "10.0.0")], "private_addresses[0].address: `10.0.0` is not an address"),
        (&[("g1", "")], "private_addresses[0].address: `` is not an address"),
        (&[("g1", "fd00::1")], "private_addresses[0].address: fd00::1 is not of the family of 203.0.113.1"),
        (&[("g1", "0.0.0.0")], "private_addresses[0].address: 0.0.0.0 is the unspecified address"),
        (&[("g1", "224.0.0.5")], "private_addresses[0].address: 224.0.0.5 is a multicast address"),
        (&[("g1", "127.0.0.1")], "private_addresses[0].address: 127.0.0.1 is a loopback address"),
        (&[("g1", "255.255.255.255")], "private_addresses[0].address: 255.255.255.255 is not a valid host address"),
        (&[("g1", "::")], "private_addresses[0].address: :: is the unspecified address"),
    ];
    for (all, expected) in cases {
        assert_eq!(error_with(all), expected);
    }
}
