//! Priority tags (VLAN ID 0), which Linux removes: the verdict is that of the untagged frame, and so is the frame that
//! userspace gets.

use super::*;

/// Type and VLAN ID of a tag.
type Tag = (u16, u16);

const CUSTOMER: u16 = 0x8100;
const PROVIDER: u16 = 0x88a8;
/// The rest of a tag's control information: priority 5, and drop eligible.
const PRIORITY: u16 = 0xb000;

/// Tags that are removed, outermost first.
const PRIORITY_TAGS: [&[Tag]; 5] = [
    &[(CUSTOMER, 0)],
    &[(PROVIDER, 0)],
    &[(PROVIDER, 0), (CUSTOMER, 0)],
    &[(CUSTOMER, 0), (CUSTOMER, 0)],
    &[(CUSTOMER, 0), (PROVIDER, 0)],
];

/// An endpoint, a local address and a VIP of each family.
fn tables() -> SteeringTables {
    let mut tables = SteeringTables::default();
    for (addresses, roles) in [
        (["10.0.0.1", "fd00::1"], ENDPOINT),
        (["10.0.0.254", "fd00::fe"], LOCAL),
        (["203.0.113.1", "2001:db8::1"], VIP),
    ] {
        for address in addresses {
            add_address(&mut tables, ip(address), roles);
        }
    }
    tables
}

fn loaded_for(frames: FrameLayout) -> Steering {
    let mut steering = Steering::load(frames).expect("tests of the steering program run as root");
    steering.add_interface(LOOPBACK, InterfaceId(0), true).expect("an interface ID");
    steering.apply(&tables()).expect("tables");
    steering
}

/// Captured frames, with the shortest length that is.
fn captured() -> [(Vec<u8>, usize); 6] {
    let group = ip("ff02::1:ff00:1");
    [
        (packet(ip("10.0.0.1"), ip("198.51.100.9")), 14 + 20),
        (packet(ip("fd00::1"), ip("2001:db8:2::9")), 14 + 40),
        // An untranslated reply.
        (packet(ip("198.51.100.9"), ip("10.0.0.1")), 14 + 20),
        (packet(ip("2001:db8:2::9"), ip("fd00::1")), 14 + 40),
        (arp_request(ip("203.0.113.1")), 14 + 28),
        (solicitation(ip("fe80::5"), group, ip("2001:db8::1")), 14 + 64),
    ]
    .map(|(frame, min_length)| (with_macs(frame), min_length))
}

/// Frames for the kernel.
fn passed() -> [Vec<u8>; 5] {
    let mut other = packet(ip("10.0.0.1"), ip("198.51.100.9"));
    other[12..14].copy_from_slice(&[0x88, 0xcc]);
    let group = ip("ff02::1:ff00:fe");
    [
        packet(ip("10.0.0.1"), ip("10.0.0.254")),
        packet(ip("fd00::1"), ip("fd00::fe")),
        arp_request(ip("10.0.0.254")),
        solicitation(ip("fd00::1"), group, ip("fd00::fe")),
        other,
    ]
    .map(with_macs)
}

fn with_macs(mut frame: Vec<u8>) -> Vec<u8> {
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    frame
}

fn tagged(frame: &[u8], tags: &[Tag]) -> Vec<u8> {
    let (macs, rest) = frame.split_at(12);
    let mut tagged = macs.to_vec();
    for (kind, id) in tags {
        tagged.extend(kind.to_be_bytes());
        tagged.extend((PRIORITY | id).to_be_bytes());
    }
    tagged.extend(rest);
    tagged
}

/// The frame as the program leaves it.
fn processed(steering: &mut Steering, frame: &[u8]) -> Vec<u8> {
    let mut output = vec![0; frame.len()];
    let options = TestRunOptions { data_in: Some(frame), data_out: Some(&mut output), ..TestRunOptions::default() };
    let result = steering.program_mut().expect("a loaded program").test_run(options).expect("a run");
    output.truncate(result.data_size_out as usize);
    output
}

/// Whether the tc guard drops a frame. A test run doesn't move its first tag to the metadata, as the kernel does.
fn is_guarded(steering: &mut Steering, frame: &[u8]) -> bool {
    steering.guard_fd().expect("the guard is loaded");
    let guard = steering.program.program_mut(GUARD_NAME).expect("the guard is loaded");
    let guard: &mut SchedClassifier = guard.try_into().expect("a classifier");
    let options = TestRunOptions { data_in: Some(frame), ..TestRunOptions::default() };
    // TC_ACT_SHOT of linux/pkt_cls.h.
    guard.test_run(options).expect("a run").return_value == 2
}

/// The verdict of both programs.
#[track_caller]
fn check(steering: &mut Steering, frame: &[u8], expected: Verdict) {
    assert_eq!(verdict(steering, frame), expected, "{frame:x?}");
    assert_eq!(is_guarded(steering, frame), expected == Socket, "the guard: {frame:x?}");
}

#[test]
fn behind_priority_tags_packets_are_captured_as_without_and_lose_the_tags() {
    for layout in [FrameLayout::Standard, FrameLayout::MultiBuffer] {
        let mut steering = loaded_for(layout);
        for (frame, _) in captured() {
            check(&mut steering, &frame, Socket);
            assert_eq!(processed(&mut steering, &frame), frame);
            for tags in PRIORITY_TAGS {
                let tagged = tagged(&frame, tags);
                check(&mut steering, &tagged, Socket);
                assert_eq!(processed(&mut steering, &tagged), frame, "{tags:x?}");
            }
        }
        for frame in passed() {
            for tags in PRIORITY_TAGS {
                let tagged = tagged(&frame, tags);
                check(&mut steering, &tagged, Kernel);
                assert_eq!(processed(&mut steering, &tagged), tagged, "the kernel removes them itself: {tags:x?}");
            }
        }
    }
}

/// Userspace drops them: behind what is removed is another tag.
#[test]
fn frames_with_more_priority_tags_than_two_are_captured_whatever_they_carry() {
    let mut steering = loaded_for(FrameLayout::Standard);
    for frame in captured().map(|(frame, _)| frame).into_iter().chain(passed()) {
        for count in 3..6 {
            for kind in [CUSTOMER, PROVIDER] {
                let tags = vec![(kind, 0); count];
                let more = tagged(&frame, &tags);
                check(&mut steering, &more, Socket);
                assert_eq!(processed(&mut steering, &more), tagged(&frame, &tags[2..]));
            }
        }
    }
}

#[test]
fn frames_of_vlans_are_the_kernels_also_behind_priority_tags() {
    let mut steering = loaded_for(FrameLayout::Standard);
    for (frame, _) in captured() {
        for id in [1, 5, 0x100, 0xfff] {
            for tags in [
                &[(CUSTOMER, id)][..],
                &[(PROVIDER, id)],
                &[(CUSTOMER, id), (CUSTOMER, 0)],
                &[(CUSTOMER, 0), (CUSTOMER, id)],
                &[(PROVIDER, 0), (CUSTOMER, 0), (CUSTOMER, id)],
            ] {
                let tagged = tagged(&frame, tags);
                check(&mut steering, &tagged, Kernel);
                assert_eq!(processed(&mut steering, &tagged), tagged);
            }
        }
    }
}

#[test]
fn tagged_frames_that_are_truncated_pass_to_the_kernel_which_drops_them() {
    let mut steering = loaded_for(FrameLayout::Standard);
    for (frame, min_length) in captured() {
        for tags in PRIORITY_TAGS {
            let (tagged, min_length) = (tagged(&frame, tags), min_length + 4 * tags.len());
            assert_eq!(verdict(&mut steering, &tagged[..min_length]), Socket, "{tags:x?}");
            assert_eq!(processed(&mut steering, &tagged[..min_length]), &frame[..min_length - 4 * tags.len()]);
            // A test run requires at least an Ethernet header.
            for length in 14..min_length {
                assert_eq!(verdict(&mut steering, &tagged[..length]), Kernel, "{length} bytes of {tagged:x?}");
            }
        }
    }
}
