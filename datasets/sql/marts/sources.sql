-- sources: what became of each source.
-- Grain: one row per source that has rows.
--   source       varchar  where it stands in the recipe, and what it is
--   benchmark    varchar  the benchmark it is for; null for training
--   rows         bigint   rows read
--   quarantined  bigint   rows that cannot be used
--   dropped      bigint   good rows that a rule dropped; of a benchmark those that were not taken
--   kept         bigint   problems in pools (or in no pool's share), or in the benchmark
with kept as (
    select source, count(*) as problems from pools group by source
    union all
    select source, count(*) from benchmarks group by source
),

final as (
    select
        stg_rows.source,
        any_value(stg_rows.benchmark) as benchmark,
        count(*) as rows,
        count(stg_rows.reason) as quarantined,
        count(*) - count(stg_rows.reason) - coalesce(any_value(kept.problems), 0) as dropped,
        coalesce(any_value(kept.problems), 0) as kept
    from stg_rows
    left join kept using (source)
    group by stg_rows.source
)

select * from final
