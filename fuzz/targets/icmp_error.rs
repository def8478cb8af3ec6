//! Fuzz target of ICMP errors: any bytes are parsed or rejected; a parsed error can be translated and parsed again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::wire::icmp_error::{IcmpErrorFamily, parse, translate};

fn translate_and_parse<A: IcmpErrorFamily>(data: &[u8], source: A, destination: A) {
    let Some((&l4, packet)) = data.split_first() else { return };
    let l4 = usize::from(l4);
    let Ok(quote) = parse::<A>(packet, l4) else { return };
    let mut translated = packet.to_vec();
    let new = Tuple { source: destination, destination: source, source_port: 7, destination_port: 9, ..quote.tuple };
    translate(&mut translated, l4, &quote, &new, source, destination);
    assert_eq!(translated.len(), packet.len());
    if let Ok(again) = parse::<A>(&translated, l4) {
        assert_eq!((again.tuple.source, again.tuple.destination, again.mtu), (destination, source, quote.mtu));
    }
}

fuzz_target!(|data: &[u8]| {
    translate_and_parse::<u32>(data, 0xc633_640a, 0x0af4_0105);
    translate_and_parse::<V6>(data, V6::MAX, V6 { high: 1, low: 2 });
});
