use std::collections::BTreeSet;

use prost::Message as _;

use super::super::{Content, Decoded, decode, encode};
use super::*;
use crate::xds::fixtures::large_service;
use crate::xds::proto;

#[test]
fn a_small_service_has_its_backends_and_a_large_one_has_slices() {
    assert_eq!([0, 1, 256, 257, 5000, 65_535].map(slice_count), [0, 0, 0, 5, 79, 1024]);
    for count in [256, 257, 300, 5000] {
        let service = large_service(count);
        let (key, Content { body, .. }) = encode::service(&service);
        let Ok(Decoded::Service(decoded)) = decode(Kind::Service, &key.name, &body) else { panic!("{key}") };
        assert_eq!(encode::service_resource(&decoded), encode::service(&service));
        let slices = backend_slices(&service);
        assert_eq!((decoded.slices as usize, decoded.slices), (slices.len(), slice_count(count as usize)));
        let mut backends = decoded.service.backends;
        assert_eq!(backends.is_empty(), decoded.slices > 0);
        for (slice, (key, content)) in slices.into_iter().zip(encode::slices(&service)) {
            assert_eq!(decode(Kind::BackendSlice, &key.name, &content.body), Ok(Decoded::BackendSlice(slice.clone())));
            assert_eq!(
                (parse_name(&key.name), slice.backends.len() < 200),
                (Some(("Service a/s", slice.number)), true)
            );
            backends.extend(slice.backends);
            backends.extend(slice.more_backends);
        }
        sort_backends(&mut backends);
        assert_eq!(backends, service.backends);
        let whole = ServiceResource { service, slices: 0 };
        let (key, Content { body, .. }) = encode::service_resource(&whole);
        assert_eq!(decode(Kind::Service, &key.name, &body), Ok(Decoded::Service(whole)));
    }
}

#[test]
fn one_slice_more_divides_one_slice() {
    let addresses: Vec<IpAddr> = large_service(3000).backends.iter().map(|backend| backend.address).collect();
    for count in 1..200 {
        let mut divided = BTreeSet::new();
        for address in &addresses {
            let (before, after) = (slice_of(hash(*address), count), slice_of(hash(*address), count + 1));
            assert!(before < count);
            if before != after {
                assert_eq!(after, count);
                divided.insert(before);
            }
        }
        assert!(divided.len() <= 1, "{count}: {divided:?}");
    }
}

#[test]
fn invalid_slices_and_their_services_are_rejected_with_field_and_reason() {
    let backend = |address: &str| proto::Backend { address: address.to_owned(), ports: vec![80], ..Default::default() };
    let slice = |service: &str, backends: &[&str]| {
        let backends = backends.iter().map(|address| backend(address)).collect();
        proto::BackendSlice { service: service.to_owned(), backends, ..Default::default() }.encode_to_vec()
    };
    let error = |kind, name: &str, body: &[u8]| decode(kind, name, body).unwrap_err().to_string();
    for name in ["s", "s#", "s#-1", "s#01", "s#4096", "#1"] {
        let reason = error(Kind::BackendSlice, name, &slice("s", &[]));
        assert_eq!(reason, format!("name: `{name}` isn't the name of a Service with `#` and a number below 4096"));
    }
    assert_eq!(error(Kind::BackendSlice, "s#1", &slice("t", &[])), "service: is `t`, but the resource is of `s`");
    let further = proto::BackendSlice {
        service: "s".to_owned(),
        more_backends: vec![backend("10.0.0.1"); 4097],
        ..Default::default()
    };
    let too_many = error(Kind::BackendSlice, "s#1", &further.encode_to_vec());
    assert_eq!(too_many, "more_backends: has 4097 entries, the maximum is 4096");
    let many: Vec<String> = (0..4097_u16).map(|n| format!("10.0.{}.{}", n >> 8, n & 255)).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(error(Kind::BackendSlice, "s#1", &slice("s", &many)), "backends: has 4097 entries, the maximum is 4096");
    let service = |backend_slices, backends| {
        let (name, ports) = ("s".to_owned(), vec![proto::ServicePort { protocol: 6, port: 80, ..Default::default() }]);
        proto::Service { name, ports, backend_slices, backends, table_size: 7, ..Default::default() }.encode_to_vec()
    };
    assert!(decode(Kind::Service, "s", &service(4096, vec![])).is_ok());
    assert_eq!(error(Kind::Service, "s", &service(4097, vec![])), "backend_slices: is 4097, the maximum is 4096");
    let both = service(1, vec![backend("10.0.0.1")]);
    assert_eq!(error(Kind::Service, "s", &both), "backends: isn't empty, but the Service has backend slices");
}

/// A Service with this many backends, all of them at three addresses.
fn shared_addresses(backends: u16) -> PlacedService {
    let service = large_service(3);
    let backend = |n: u16| PlacedBackend {
        ports: [1 + n / 3].into(),
        weight: 1 + n % 7,
        ..service.backends[usize::from(n % 3)].clone()
    };
    let mut backends: Vec<_> = (0..backends).map(backend).collect();
    sort_backends(&mut backends);
    PlacedService { backends, ..service }
}

#[test]
fn backends_of_one_address_survive_in_a_service_and_in_slices_of_all_sizes() {
    for count in [2, 4, 256, 257, 5000, 65_535] {
        let service = shared_addresses(count);
        let slices = backend_slices(&service);
        let mut backends = Vec::new();
        for (slice, (key, content)) in slices.into_iter().zip(encode::slices(&service)) {
            assert_eq!(decode(Kind::BackendSlice, &key.name, &content.body), Ok(Decoded::BackendSlice(slice.clone())));
            assert!(slice.more_backends.len() < 200, "{count}: {} in one slice", slice.more_backends.len());
            backends.extend([slice.backends, slice.more_backends].concat());
        }
        sort_backends(&mut backends);
        assert_eq!(backends.is_empty(), count <= 256);
        assert!(backends.is_empty() || backends == service.backends);
        let whole = ServiceResource { service, slices: 0 };
        let (key, Content { body, .. }) = encode::service_resource(&whole);
        assert_eq!(decode(Kind::Service, &key.name, &body), Ok(Decoded::Service(whole)));
    }
}

#[test]
fn a_changed_backend_changes_one_slice_and_another_one_of_its_address_none_but_its_own() {
    let slices = |backends: Vec<PlacedBackend>| backend_slices(&PlacedService { backends, ..large_service(0) });
    let all = shared_addresses(3000).backends;
    let changed = |change: &dyn Fn(&mut Vec<PlacedBackend>)| {
        let mut after = all.clone();
        change(&mut after);
        slices(all.clone()).iter().zip(&slices(after)).filter(|(one, other)| one != other).count()
    };
    for at in [0, 7, 999, 1000, 2999] {
        assert_eq!(changed(&|backends| backends[at].weight = 200), 1);
    }
    // In place of another one, so that their number stays the same: both slices change.
    assert!(changed(&|backends| backends[7].ports = [9000].into()) <= 2);
}
