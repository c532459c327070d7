-- stg_source_counts: how much of each source can be used.
-- Grain: one row per source that has rows.
--   source     varchar  where it stands in the recipe, and what it is
--   row_count  bigint   rows read
--   bad_count  bigint   of them in quarantine
--   bad_share  double   bad_count / row_count
with final as (
    select
        source,
        count(*) as row_count,
        count(reason) as bad_count,
        count(reason) / count(*) as bad_share
    from stg_rows
    group by source
)

select * from final
